"""Two commits side by side: ``bench_overhead.py --against``."""
