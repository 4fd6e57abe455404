"""Context parallelism: attention over sequences that are cut over ranks.

attention  ring attention with its gradients, as a function and as a module
traffic    its messages: which go round, which go to their owner
layout     which tokens a rank holds, and what it computes of them
blocks     one block of attention in plain torch
kernels    one block by torch's kernels on a GPU
"""
