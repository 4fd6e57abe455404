"""Two levels on processes: 1/L of the bytes, nodes and groups of any kind.

``test_three_levels`` has their collectives on threads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Levels, Meter
from hybridcomp.collectives.hierarchical.units import grid_of
from hybridcomp.collectives.topology import Nodes, discover
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from tests.collectives import calls
from tests.collectives.common import bound, values_of
from tests.ranks import RunRanks
from tests.stand_ins.plain_codecs import Identity

#: (ranks, ranks per node)
SHAPES = [(4, 2), (6, 2), (6, 3)]
_nodes: dict[int, Nodes] = {}


def levels_of(width: int) -> Levels:
    """Return the two levels of the default group, created once per persistent rank."""
    if width not in _nodes:
        _nodes[width] = discover(width)
        (note,) = _nodes[width].prepare([tuple(range(dist.get_world_size()))])
        nodes = dist.get_world_size() // width
        assert f"encoded between {nodes} nodes of {width} ranks" in note
    levels = _nodes[width].group(None, two_levels=True).levels
    assert levels is not None
    return levels


def _flat_and_levels(width: int, numel: int) -> tuple[int, int]:
    """Return bytes to other nodes of an all_reduce, flat and in two levels."""
    levels, codec = levels_of(width), Identity()
    flat, two = Meter(), Meter()
    group = _nodes[width].group(None, two_levels=False)
    calls.all_reduce(torch.ones(numel), codec, group, meter=flat)
    calls.all_reduce(torch.ones(numel), codec, levels, meter=two)
    return flat.inter_nbytes, two.inter_nbytes


@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_bytes_between_nodes(on_ranks: RunRanks, ranks: int, width: int) -> None:
    """The all-to-all sends 1/L; the gather sends the bytes of a ring over N nodes instead of W."""
    numel = 32 * ranks * 8
    nodes, nbytes = ranks // width, numel * 4
    flat, two = (
        sum(column) for column in zip(*on_ranks(ranks, _flat_and_levels, width, numel), strict=True)
    )
    assert flat == (ranks - width) * nbytes + nodes * (ranks - 1) * nbytes // ranks
    assert two == (ranks - width) * nbytes // width + (nodes - 1) * nbytes


def _dealt(codec: Codec) -> None:
    """With ranks dealt to nodes round-robin, shards of gathers and sums reach their owners."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    nodes = Nodes([rank % 2 for rank in range(ranks)], "test")
    nodes.prepare([tuple(range(ranks))])
    levels = nodes.group(None, two_levels=True).levels
    assert levels is not None and levels.grid == ((0, 2), (1, 3)) and not levels.shape
    for numel in (1, 33, 1000):
        shard = values_of(me, numel, torch.bfloat16)
        flat, deep = (torch.zeros(ranks * numel, dtype=torch.bfloat16) for _ in range(2))
        for out, group in ((flat, None), (deep, levels)):
            calls.all_gather(shard, out, codec, group).wait()
        assert torch.equal(flat, deep)
        whole = [values_of(rank, ranks * numel, torch.float32) for rank in range(ranks)]
        shards = whole[me].chunk(ranks)
        found = calls.reduce_scatter(shards, codec, levels).wait()
        exact = torch.stack([one.chunk(ranks)[me] for one in whole]).sum(0)
        assert float((found - exact).abs().max()) <= bound(codec, whole, 1) + 1e-4


@pytest.mark.parametrize("codec", (Identity(), make_codec("blockint", bits=8)), ids=str)
def test_ranks_that_do_not_count_node_by_node(on_ranks: RunRanks, codec: Codec) -> None:
    on_ranks(4, _dealt, codec)


def _subsets() -> list[Any]:
    """Use data-parallel groups of two stages, one across two nodes and one inside a node."""
    nodes, me = discover(2), dist.get_rank()
    stages = [(0, 1, 4, 5), (2, 3)]
    own = [stage for stage in stages if me in stage]
    assert [note.startswith("two levels over 3 nodes") for note in nodes.prepare(own)] == [True]
    groups = {stage: dist.new_group(list(stage)) for stage in stages}
    levels = nodes.group(groups[own[0]], two_levels=True).levels
    if own[0] == (2, 3):
        return [levels, None]
    assert levels is not None and levels.grid == ((0, 1), (2, 3))
    tensor = torch.full((64,), float(me))
    calls.all_reduce(tensor, Identity(), levels)
    return [len(levels.grid), float(tensor[0])]


def test_groups_that_are_subsets_of_the_job(on_ranks: RunRanks) -> None:
    results = on_ranks(6, _subsets)
    assert [results[rank] for rank in (0, 1, 4, 5)] == [[2, 10.0]] * 4
    assert results[2] == results[3] == [None, None], "a group inside one node stays flat"


def _remade() -> bool:
    """One rank detects that its groups were destroyed; all of them create new ones."""
    ranks = tuple(range(4))
    before, again, after = (discover(2) for _ in range(3))
    before.prepare([ranks])
    again.prepare([ranks])
    first, second = (nodes.group(None, two_levels=True).levels for nodes in (before, again))
    assert first is not None and second is not None
    kept = first.outer.process_group
    assert kept is second.outer.process_group, "made once"
    dist.destroy_process_group(kept)
    after.prepare([ranks])
    _nodes[2] = after  # for later tests on this rank
    third = after.group(None, two_levels=True).levels
    assert third is not None and third.outer.process_group is not kept
    tensor = torch.full((64,), float(dist.get_rank()))
    calls.all_reduce(tensor, Identity(), third)
    return float(tensor[0]) == 6.0


def test_destroyed_groups_are_made_anew(on_ranks: RunRanks) -> None:
    assert all(on_ranks(4, _remade))


def _uneven() -> Any:
    nodes = Nodes([0, 0, 0, 1], "test")
    notes = nodes.prepare([(0, 1, 2, 3)])
    group = nodes.group(None, two_levels=True)
    return notes, group.levels, sorted(group.remote)


def test_uneven_nodes_are_said(on_ranks: RunRanks) -> None:
    for rank, (notes, levels, remote) in enumerate(on_ranks(4, _uneven)):
        assert levels is None and len(notes) == 1 and "1 and 3 ranks" in notes[0]
        assert remote == ([3] if rank < 3 else [0, 1, 2])


def test_grids() -> None:
    assert grid_of([7, 7, 7]) is None and grid_of([0, 1, 2]) is None
    assert grid_of([0, 0, 1, 1]) == ((0, 1), (2, 3))
    assert grid_of([0, 1, 0, 1]) == ((0, 2), (1, 3))
    assert "no regular order" in str(grid_of([0, 1, 1, 0]))


def _discovered() -> list[Any]:
    import os

    rank = dist.get_rank()
    try:
        found = [discover("auto")]
        os.environ["GROUP_RANK"] = str(rank // 2)
        found.append(discover("auto"))
        os.environ["CROSS_RANK"] = str(rank % 2)
        found.append(discover("auto"))
        if rank == 1:
            del os.environ["CROSS_RANK"]  # set on some ranks only, so it is ignored
        found.append(discover("auto"))
    finally:
        os.environ.pop("GROUP_RANK", None)
        os.environ.pop("CROSS_RANK", None)
    with pytest.raises(ConfigError, match=r"compression.hierarchy: found 3; the job has 4 ranks"):
        discover(3)
    return [(nodes.of_rank, nodes.source) for nodes in found]


def test_nodes_come_from_the_launcher(on_ranks: RunRanks) -> None:
    expected = [
        ((0, 0, 0, 0), "host"),
        ((0, 0, 1, 1), "GROUP_RANK"),
        ((0, 1, 0, 1), "CROSS_RANK"),
        ((0, 0, 1, 1), "GROUP_RANK"),
    ]
    assert on_ranks(4, _discovered) == [expected] * 4


def _said_of_one_node(hierarchy: Any, absent: frozenset[Any]) -> list[str]:
    channels = Channels(CompressionConfig.parse({"preset": "recommended", "hierarchy": hierarchy}))
    channels.leave_out(absent)
    return channels.place([tuple(range(dist.get_world_size()))])


def test_ranks_of_one_node_are_told_that_there_is_little_to_gain(on_ranks: RunRanks) -> None:
    """It covers the dimensions of the job: DDP gathers no parameters."""
    (ddp, *same) = on_ranks(2, _said_of_one_node, "auto", frozenset({"zero"}))
    assert same == [ddp] and len(ddp) == 1
    assert ddp[0].startswith("dp: all ranks share one node (by ")
    assert "there is little to gain here" in ddp[0]
    (both, _) = on_ranks(2, _said_of_one_node, "auto", frozenset())
    assert both[0].startswith("dp, zero: all ranks share one node")
