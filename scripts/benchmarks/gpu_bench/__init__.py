"""Parts of bench_gpu.py: the subjects, their peers, the targets and the report."""
