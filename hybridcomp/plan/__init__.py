"""The planner: which layout, which recomputation and which codecs a job should have on a cluster.

Its words, what is asked and answered:

request  batch, limits, and the answer of a search
layout   parallel degrees, cuts, recomputation
choices  the codec of every dimension and direction
plan     an answer with its prediction, and plan.json

Its folders, each above the one before it:

algorithms  exact searches over chains, graphs and choices; they know no tensor and no training
machines    what ranks, links, codecs and kernels take, and the file that says so
models      what is trained: closed forms of decoders, any module traced
cost        what a step of a placed layout takes, in seconds and in memory
search      which layouts there are, which fit, and which is fastest
answer      ``hybridcomp plan``: the table, the picture, the files, a trial and a check
"""
