"""Parts of bench_sites.py: what a rank trains, and the tables of what it left."""
