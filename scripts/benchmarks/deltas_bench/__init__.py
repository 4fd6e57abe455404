"""Parts of bench_deltas.py: weight traces, their entropy, and bits of other formats."""
