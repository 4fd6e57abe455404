"""Context parallelism: attention over sequences that are cut over ranks.

attention  ring attention, as a function and as a module
passes     its two passes: which block when, and what is kept between them
traffic    its messages: which go round, which go to their owner
layout     which tokens a rank holds, and what it computes of them
blocks     one block of attention in plain torch
kernels    one block by torch's kernels on a GPU
rotation   the same messages for torch's own ring
"""
