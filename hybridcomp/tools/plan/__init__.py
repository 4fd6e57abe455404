"""Plan a job: choose its layout, its recomputation and its codecs for a cluster.

The request and its answer:

request  batch, limits, and the answer of a search
layout   parallel degrees, cuts, recomputation
choices  the codec of every dimension and direction
plan     an answer with its prediction, and plan.json

Folders, from the lowest layer to the highest:

algorithms  exact searches over chains, graphs and choices; they know no tensor and no training
machines    speeds of ranks, links, codecs and kernels, and ``cluster.json``, which holds them
models      the model to train: closed forms of decoders, and traces of any other module
cost        seconds and memory of one step of a layout placed on a cluster
search      enumerates layouts, drops those that do not fit, and ranks the others by speed
answer      ``hybridcomp plan``: the table, the picture, the files, a trial and a check
"""
