"""Context parallelism: attention over sequences that are sharded over ranks.

attention  ring attention, as a function and as a module
passes     its forward and backward pass: the order of blocks, and the saved tensors
traffic    its messages: keys and values go round the ring, gradients go to the keys' owner
layout     the tokens that a rank holds, and the part of a block that the rank computes
blocks     attention of one block in plain torch
kernels    attention of one block by torch's kernels on a GPU
rotation   the same messages for torch's own ring attention
"""
