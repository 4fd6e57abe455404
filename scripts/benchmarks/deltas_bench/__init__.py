"""Parts of bench_deltas.py: traces of weights, how many bits they need, and what others send."""
