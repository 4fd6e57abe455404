"""Parts of ``bench_plan.py``."""
