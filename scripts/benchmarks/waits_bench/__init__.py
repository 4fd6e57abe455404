"""Parts of ``bench_gpu_waits.py``: analyze a training's waits from its ranks' traces."""
