"""Several jobs on one cluster: how many ranks each of them gets, now and at every change.

An evolutionary search over the ranks of the jobs, after ONES (Bian et al., SC 2021), by the
planner's own step times; a replay that compares it with other policies; the files that start the
jobs.
"""
