"""The search for plans.

space     the layouts that an engine can run
budget    the codecs that a budget of error allows
placing   a layout's cuts and recomputation
evaluate  the best choices of a placed layout
search    the fastest plans, by bounds
nearest   the answer where nothing fits
"""
