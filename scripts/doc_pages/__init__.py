"""What scripts/make_docs.py writes: pages and parts of pages that are made from the code."""
