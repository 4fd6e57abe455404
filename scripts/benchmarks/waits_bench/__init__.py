"""Parts of ``bench_gpu_waits.py``: what a training waits for, read from traces of its ranks."""
