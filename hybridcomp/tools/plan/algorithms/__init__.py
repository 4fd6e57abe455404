"""Algorithms of planning, exact for the costs that they are given.

They know no tensor, no network and no engine:

cuts           stages of a chain of layers on unequal devices, by dynamic programming
dag_partition  stages of a model that is no chain, by dynamic programming over ideals
recompute      layers to recompute under a memory limit, by dynamic programming on the chain
frontier       Pareto frontiers of pairs
"""
