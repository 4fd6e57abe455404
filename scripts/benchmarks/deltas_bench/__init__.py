"""Parts of bench_deltas.py: weight traces, their entropy, and other delta formats."""
