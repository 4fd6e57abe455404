"""What bench_gpu.py measures, against whom, what it must show, and how it shows it."""
