"""Speed of training over slow links, natively, compressed and with the peers: bench_training.py."""
