"""Planning algorithms: how a model is cut into stages, recomputed and timed on given machines.

cuts       stages of a chain of layers on unequal devices, by dynamic programming over intervals
ideals     stages of a model that is no chain, by dynamic programming over ideals
recompute  which layers to recompute under a memory limit, by dynamic programming on the chain
timeline   an event simulation of one step, and delta simulation of an edited one
slices     where to slice a sequence for a pipeline, as TeraPipe does
anneal     a seeded Metropolis search over choices that are too many to enumerate

cluster       what the machines can do: lookups of links, codecs and kernels, each with its spread
cluster_file  its file: reading, writing, schema; ``described`` is the form written by hand
rows          the rows of that file; ``figures``: numbers with a spread, curves through them
rings         closed forms where a group was not measured; ``overheads``: the host's work a message

Every algorithm is exact for the costs that it is given, but for ``anneal``. They know no tensor, no
network and no engine: seconds and bytes come from whoever calls.
"""
