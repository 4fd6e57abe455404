"""Two levels: the sums of the flat collectives, within their bounds, with 1/L of the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels import Channels
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Levels, Meter, OwnedRange, Shards, Transfer, chunk_ranges
from hybridcomp.collectives.hierarchical.units import grid_of
from hybridcomp.collectives.topology import Nodes, discover
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from tests.collectives import calls
from tests.collectives.calls import fed_back
from tests.collectives.common import all_reduce_wire, bound, digest, rank_order_sum, values_of
from tests.ranks import RunRanks
from tests.stand_ins.plain_codecs import Identity, Int8, Wide

CODECS: tuple[Codec, ...] = (
    Identity(), Int8(), Wide(), make_codec("expcode"), make_codec("blockint", bits=4),
    make_codec("zfp", rate=8.0), make_codec("radix", error_bound=1e-2),
)  # fmt: skip
#: (ranks, ranks per node)
SHAPES = [(4, 2), (6, 2), (6, 3)]
NUMELS = (1, 33, 100, 1000, 4096)
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


def inside(codec: Codec, inputs: Sequence[Tensor], width: int) -> list[Tensor]:
    """Return the values that every node encodes."""
    dtype = inputs[0].dtype
    sums = [rank_order_sum(list(inputs[i : i + width])) for i in range(0, len(inputs), width)]
    return [total.to(dtype) if codec.lossless else total for total in sums]


def check(result: Tensor, codec: Codec, inputs: Sequence[Tensor], width: int, hops: int) -> None:
    """Compare with the fp32 sum: the bound of a flat sum over the nodes, and over all ranks."""
    sums = inside(codec, inputs, width)
    exact = rank_order_sum(sums)
    if codec.lossless:  # a second hop carries sums in the message's dtype
        assert torch.equal(result.to(inputs[0].dtype), exact.to(inputs[0].dtype))
        return
    error = float((result.float() - exact).abs().max()) if result.numel() else 0.0
    rounding = float(exact.abs().max()) * torch.finfo(inputs[0].dtype).eps if exact.numel() else 0.0
    assert error <= bound(codec, sums, hops) + rounding
    assert bound(codec, sums, hops) <= bound(codec, list(inputs), hops) * 1.001


def _all_reduce(codec: Codec, width: int) -> list[str]:
    me, ranks, levels = dist.get_rank(), dist.get_world_size(), levels_of(width)
    digests = []
    for dtype in (torch.float32, torch.bfloat16):
        for numel in NUMELS:
            inputs = [values_of(rank, numel, dtype) for rank in range(ranks)]
            tensor, meter = inputs[me].clone(), Meter()
            handle = calls.all_reduce(tensor, codec, levels, meter=meter, async_op=True)
            handle.wait()
            check(tensor, codec, inputs, width, hops=2)
            digests.append(digest(tensor))
            if codec.fixed_size:
                assert meter.inter_nbytes == between(codec, numel, dtype, levels)
                inner = inside_nbytes(numel, dtype, levels)
                assert meter.wire_nbytes == meter.inter_nbytes + inner
    return digests


def between(codec: Codec, numel: int, dtype: torch.dtype, levels: Levels) -> int:
    """Return the bytes a rank sends to other nodes in an all_reduce, in closed form."""
    start, stop = chunk_ranges(numel, levels.width)[levels.local]
    sent = dtype if codec.lossless else torch.float32
    return all_reduce_wire(codec, stop - start, sent, levels.node, levels.nodes)


def inside_nbytes(numel: int, dtype: torch.dtype, levels: Levels) -> int:
    """Return the bytes a rank sends inside its node, in closed form: native, both directions."""
    lengths = [b - a for a, b in chunk_ranges(numel, levels.width)]
    return dtype.itemsize * (numel - lengths[levels.local] + (levels.width - 1) * max(lengths))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_all_reduce(on_ranks: RunRanks, ranks: int, width: int, codec: Codec) -> None:
    results = on_ranks(ranks, _all_reduce, codec, width)
    assert all(result == results[0] for result in results)


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


def _reduce_scatter(codec: Codec, width: int, lengths: list[int], dtype: torch.dtype) -> None:
    me, ranks, levels = dist.get_rank(), dist.get_world_size(), levels_of(width)
    inputs = [values_of(rank, sum(lengths), dtype) for rank in range(ranks)]
    own = inputs[me].clone()
    meter = Meter()
    shards = list(torch.split(own, lengths))
    total = calls.reduce_scatter(shards, codec, levels, meter=meter).wait()
    assert torch.equal(own, inputs[me]), "the shards belong to the caller"
    assert total.dtype == torch.float32 and total.numel() == lengths[me]
    parts = [torch.split(values, lengths)[me] for values in inputs]
    check(total, codec, parts, width, hops=1)
    if codec.fixed_size:
        others = [row[levels.local] for a, row in enumerate(levels.grid) if a != levels.node]
        sent = dtype if codec.lossless else torch.float32
        assert meter.inter_nbytes == sum(codec.wire_nbytes(lengths[r], sent) for r in others)
    if levels.shape and lengths[0] and len(set(lengths)) == 1:
        columns = [shards[row[local]] for local in range(width) for row in levels.grid]
        by_node = Shards(torch.cat(columns), lengths[0], levels.shape)
        assert all(map(torch.equal, by_node, shards))
        again = calls.reduce_scatter(by_node, codec, levels, meter=Meter()).wait()
        assert torch.equal(again, total), "without a copy into this order"
        via = Transfer(codec, calls.group_of(levels), Meter())
        both = [torch.zeros(lengths[0] * levels.nodes) for _ in range(2)]
        for each, sums in zip((shards, by_node), both, strict=True):
            collectives.keep_shards(each, via, sums).wait()
        assert torch.equal(*both)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(
    ("width", "lengths"),
    [(2, [64] * 4), (2, [100, 0, 7, 333]), (2, [0] * 4), (3, [5, 0, 333, 64, 1, 40])],
    ids=str,
)
def test_reduce_scatter(on_ranks: RunRanks, width: int, lengths: list[int], codec: Codec) -> None:
    for dtype in (torch.float32, torch.float16):
        on_ranks(len(lengths), _reduce_scatter, codec, width, lengths, dtype)


def _to_owners(codec: Codec, width: int, ranges: list[OwnedRange], dtype: torch.dtype) -> Any:
    me, ranks, levels = dist.get_rank(), dist.get_world_size(), levels_of(width)
    numel = ranges[-1].stop
    inputs = [values_of(rank, numel, dtype) for rank in range(ranks)]
    own = inputs[me].clone()
    sums = calls.reduce_to_owners(own, ranges, codec, levels, meter=Meter())
    assert torch.equal(own, inputs[me])
    mine = [owned for owned in ranges if me in owned.ranks]
    found = {}
    for owned, total in zip(mine, sums, strict=True):
        assert total.dtype == torch.float32
        check(total, codec, [v[owned.start : owned.stop] for v in inputs], width, hops=2)
        found[owned.start, owned.stop] = digest(total)
    return found


OWNERS = {
    4: [
        [OwnedRange(0, 300, (1,)), OwnedRange(300, 300, (0,)), OwnedRange(300, 1000, (2,))],
        [OwnedRange(0, 990, (3,)), OwnedRange(990, 1000, (0, 3))],
        [OwnedRange(0, 40, (0, 1, 2, 3)), OwnedRange(40, 999, (0,)), OwnedRange(999, 1000, (2,))],
    ],
    6: [
        [OwnedRange(0, 100, (0, 5)), OwnedRange(100, 700, (4,)), OwnedRange(700, 1000, (1, 2))],
        [OwnedRange(200 * i, 200 * i + 200, (i,)) for i in range(6)],
    ],
}


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_reduce_to_owners(on_ranks: RunRanks, ranks: int, width: int, codec: Codec) -> None:
    for ranges in OWNERS[ranks]:
        for dtype in (torch.float32, torch.bfloat16):
            results = on_ranks(ranks, _to_owners, codec, width, ranges, dtype)
            for owned in ranges:
                copies = [results[rank][owned.start, owned.stop] for rank in owned.ranks]
                assert len(set(copies)) == 1, "owners of one range hold the same bits"


def _all_gather(codec: Codec, width: int) -> str:
    me, ranks, levels = dist.get_rank(), dist.get_world_size(), levels_of(width)
    found = []
    for numel in (0, 1, 100, 1000):
        shards = [values_of(rank, numel, torch.bfloat16) for rank in range(ranks)]
        out, meter = torch.empty(ranks * numel, dtype=torch.bfloat16), Meter()
        out[me * numel : (me + 1) * numel] = shards[me]
        place = out[me * numel : (me + 1) * numel]
        calls.all_gather(place, out, codec, levels, meter=meter, async_op=True).wait()
        for shard, values in zip(shards, out.view(ranks, numel), strict=True):
            error = float((values.float() - shard.float()).abs().max()) if numel else 0.0
            assert error <= bound(codec, [shard], hops=1)
        if codec.fixed_size:
            slot = codec.wire_nbytes(numel, torch.bfloat16)
            assert meter.inter_nbytes == (levels.nodes - 1) * slot
        found.append(digest(out))
    shard = values_of(me, 1000, torch.bfloat16)  # split at 900, as two messages
    whole = torch.empty(ranks * 1000, dtype=torch.bfloat16)
    calls.all_gather(shard, whole, codec, levels, meter=Meter(), cuts=[900]).wait()
    places = torch.split(whole.view(ranks, -1), [900, 100], 1)
    for part, place in zip(torch.split(shard, [900, 100]), places, strict=True):
        out = torch.empty(place.numel(), dtype=torch.bfloat16)
        calls.all_gather(part, out, codec, levels, meter=Meter()).wait()
        assert torch.equal(out, place.reshape(-1))
    return " ".join(found)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_all_gather(on_ranks: RunRanks, ranks: int, width: int, codec: Codec) -> None:
    assert len(set(on_ranks(ranks, _all_gather, codec, width))) == 1


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
            calls.all_gather(shard, out, codec, group, meter=Meter()).wait()
        assert torch.equal(flat, deep)
        whole = [values_of(rank, ranks * numel, torch.float32) for rank in range(ranks)]
        shards = whole[me].chunk(ranks)
        found = calls.reduce_scatter(shards, codec, levels, meter=Meter()).wait()
        exact = torch.stack([one.chunk(ranks)[me] for one in whole]).sum(0)
        assert float((found - exact).abs().max()) <= bound(codec, whole, 1) + 1e-4


@pytest.mark.parametrize("codec", (Identity(), make_codec("blockint", bits=8)), ids=str)
def test_ranks_that_do_not_count_node_by_node(on_ranks: RunRanks, codec: Codec) -> None:
    on_ranks(4, _dealt, codec)


def _feedback(codec: Codec, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return fed_back(codec, levels_of(width), dist.get_rank())


@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_nothing_is_lost(on_ranks: RunRanks, ranks: int, width: int) -> None:
    for codec in (Int8(), make_codec("blockint", bits=4)):
        found = on_ranks(ranks, _feedback, codec, width)
        given, delivered, held = (sum(part) for part in zip(*found, strict=True))
        assert float((given - delivered - held).abs().max()) <= 1e-5 * float(given.abs().max())
        assert held.abs().max() > 0


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
    calls.all_reduce(tensor, Identity(), levels, meter=Meter())
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
    calls.all_reduce(tensor, Identity(), third, meter=Meter())
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
