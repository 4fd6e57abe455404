"""Subgroups of two levels: created once, shared, and destroyed when unused."""

from __future__ import annotations

import gc

import torch.distributed as dist

from hybridcomp.collectives import topology
from tests.ranks import run_ranks


def living() -> int:
    """Return hybridcomp's subgroups that are still referenced, after a collection."""
    gc.collect()
    return sum(made is not None and made() is not None for made in topology._made.values())


def let_go(_: None) -> list[int]:
    world = tuple(range(4))
    first, second = topology.discover(2), topology.discover(2)
    first.prepare([world])
    found = [living()]
    second.prepare([world])
    found.append(living())  # the same ones
    del first
    topology.let_go()
    found.append(living())  # the second one uses them
    before = len(dist.distributed_c10d._world.pg_map)
    del second
    topology.let_go()
    found += [living(), before - len(dist.distributed_c10d._world.pg_map)]
    again = topology.discover(2)
    again.prepare([world])
    group = again.group(None, two_levels=True)
    assert group.levels is not None and group.levels.inner.size == 2
    dist.barrier(group.levels.inner.process_group)
    return [*found, living()]


def test_subgroups_live_as_long_as_they_are_used() -> None:
    assert run_ranks(4, let_go, None) == [[2, 2, 2, 0, 2, 2]] * 4
