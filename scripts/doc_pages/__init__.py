"""Pages and parts of pages that scripts/make_docs.py makes from the code."""
