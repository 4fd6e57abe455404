"""The planner: which layout, which recomputation and which codecs a job should have on a cluster.

What is asked and answered:

request      batch, limits, and the answer of a search
layout       parallel degrees, cuts, recomputation
choices      the codec of every dimension and direction; ``budget``: which are allowed
plan         an answer with its prediction, and plan.json
model        what is trained; ``models``: closed forms of decoders, any module traced
torch_tools  the one place that touches torch's private tools

The machines:

cluster       what they can do: lookups of links, codecs and kernels, each with its spread
cluster_file  its file: reading, writing, schema; ``described`` is the form written by hand
rows          the rows of that file; ``figures``: numbers with a spread, curves through them
rings         closed forms where a group was not measured; ``overheads``: the host's work a message

What a step costs:

job         a model on a cluster: seconds of layers, messages of a layout
prices      one message: coding, wire, bytes
work        what every stage does; ``times``: its seconds, and a bound of the step
schedule    in which order (1F1B, interleaved)
step        the step as a timeline; ``recurrence``: its seconds alone
memory      what a rank needs
predict     the prediction for people
fitted      the cost model that was fitted to measured trainings

Searching:

space     the layouts that an engine can run
placing   their cuts and recomputation
evaluate  the best choices of a placed layout
search    the fastest plans, by bounds
mcmc      a Metropolis walk over layouts, codecs and single layers

Algorithms, exact for the costs that they are given, but for ``anneal``. They know no tensor, no
network and no engine:

cuts       stages of a chain of layers on unequal devices, by dynamic programming over intervals
ideals     stages of a model that is no chain, by dynamic programming over ideals
recompute  which layers to recompute under a memory limit, by dynamic programming on the chain
timeline   an event simulation of one step, and delta simulation of an edited one
slices     where to slice a sequence for a pipeline, as TeraPipe does
anneal     a seeded Metropolis search over choices that are too many to enumerate
"""
