"""Other ways to compress the gradients of data parallelism, for the same example and table.

torch's own DDP hooks, and clean-room reimplementations from the papers, marked as such: nothing of
their authors' code is in here. None of this is part of the hybridcomp package.
"""
