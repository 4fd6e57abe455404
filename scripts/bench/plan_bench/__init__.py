"""What ``bench_plan.py`` is made of."""
