"""What bench_gpu.py measures, against whom, and how it shows it."""
