"""Parts of bench_context.py."""
