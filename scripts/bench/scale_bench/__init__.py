"""Parts of bench_scale.py: steps of engines by their seams, what they cost, plans, pages."""
