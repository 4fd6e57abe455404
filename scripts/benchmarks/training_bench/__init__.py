"""Parts of bench_training.py: training over slow links, native, compressed and with peers."""
