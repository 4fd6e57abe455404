"""Pages and sections that scripts/make_docs.py generates from the code."""
