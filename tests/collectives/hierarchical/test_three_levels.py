"""Two or more levels: nested sums, within the bound of two quantizations, for any placement."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Levels, Meter, OwnedRange, Shards, chunk_ranges, keep_shards
from hybridcomp.collectives.hierarchical.discovery import ADDRESS
from hybridcomp.collectives.hierarchical.units import Arrangement, arrange
from hybridcomp.collectives.topology import Nodes, discover
from hybridcomp.errors import ConfigError
from tests.collectives import calls
from tests.collectives.common import (
    all_reduce_wire,
    bound,
    check_levels,
    digest,
    rank_order_sum,
    values_of,
)
from tests.collectives.hierarchical.in_threads import everywhere, units_of
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins import thread_groups
from tests.stand_ins.plain_codecs import Identity, Int8, Wide

CODECS: tuple[Codec, ...] = (
    Identity(), Int8(), Wide(), make_codec("expcode"), make_codec("blockint", bits=4),
    make_codec("radix", error_bound=1e-2),
)  # fmt: skip
DAY = [codec for codec in CODECS if codec.name in ("identity", "expcode", "blockint")]
WIDTHS = (2, 2)
#: units of consecutive ranks, and ranks
SHAPES = [
    ((2,), 4), ((2, 2), 8), ((1, 2), 4), ((3,), 6), ((2, 3), 12), ((3, 2), 18), ((2, 2, 2), 16),
]  # fmt: skip
NUMELS = (1, 33, 1000)


def owners_of(ranks: int) -> list[list[OwnedRange]]:
    """Return ranges that take the direct plan, those of few owners, and with several owners."""
    last = ranks - 1
    return [
        [OwnedRange(100 * rank, 100 * rank + 100, (rank,)) for rank in range(ranks)],
        [OwnedRange(0, 300, (last,)), OwnedRange(300, 300, (0,)), OwnedRange(300, 1000, (1, 2))],
        [OwnedRange(0, 40, tuple(range(ranks))), OwnedRange(40, 999, (last,))],
    ]


def on_levels(widths: Sequence[int], ranks: int, run: Callable[[Levels, int], Any]) -> list[Any]:
    """Return the result of ``run`` on each rank, which is a thread."""
    return everywhere(units_of(widths, ranks), run)


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize(("widths", "ranks"), by_day(SHAPES, SHAPES[:4]), ids=str)
def test_all_reduce(widths: tuple[int, ...], ranks: int, codec: Codec) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for numel in NUMELS:
            inputs = [values_of(rank, numel, dtype) for rank in range(ranks)]

            def run(
                levels: Levels, rank: int, inputs: list[Tensor] = inputs, numel: int = numel
            ) -> Tensor:
                tensor, meter = inputs[rank].clone(), Meter()
                calls.all_reduce(tensor, codec, levels, meter=meter, async_op=True).wait()
                if codec.fixed_size:
                    assert meter.inter_nbytes == between(codec, numel, tensor.dtype, levels)
                if codec.fixed_size and len(widths) == 1:
                    inside = inside_nbytes(numel, tensor.dtype, levels)
                    assert meter.wire_nbytes == meter.inter_nbytes + inside
                return tensor

            found = on_levels(widths, ranks, run)
            assert len({digest(tensor) for tensor in found}) == 1
            check_levels(found[0], codec, inputs, widths, hops=2)


def between(codec: Codec, numel: int, dtype: torch.dtype, levels: Levels) -> int:
    """Return the bytes that a rank sends out of its largest unit, in closed form."""
    start, stop = chunk_ranges(numel, levels.width)[levels.local]
    sent = dtype if codec.lossless else torch.float32
    return all_reduce_wire(codec, stop - start, sent, levels.node, levels.nodes)


def inside_nbytes(numel: int, dtype: torch.dtype, levels: Levels) -> int:
    """Return the bytes that a rank sends inside its node, in closed form: native, both ways."""
    lengths = [b - a for a, b in chunk_ranges(numel, levels.width)]
    return dtype.itemsize * (numel - lengths[levels.local] + (levels.width - 1) * max(lengths))


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("widths", "ranks"), by_day(SHAPES, SHAPES[:4]), ids=str)
def test_reduce_scatter(
    widths: tuple[int, ...], ranks: int, dtype: torch.dtype, codec: Codec
) -> None:
    uneven = [(100, 0, 7, 333)[rank % 4] for rank in range(ranks)]
    sent = dtype if codec.lossless else torch.float32
    for lengths in ([64] * ranks, uneven, [0] * ranks):
        inputs = [values_of(rank, sum(lengths), dtype) for rank in range(ranks)]

        def run(
            levels: Levels,
            rank: int,
            inputs: list[Tensor] = inputs,
            lengths: list[int] = lengths,
        ) -> Tensor:
            own, meter = inputs[rank].clone(), Meter()
            shards = list(torch.split(own, lengths))
            total = calls.reduce_scatter(shards, codec, levels, meter=meter).wait()
            assert torch.equal(own, inputs[rank]), "the shards belong to the caller"
            if codec.fixed_size:
                others = [row[levels.local] for row in levels.grid if rank not in row]
                assert meter.inter_nbytes == sum(
                    codec.wire_nbytes(lengths[r], sent) for r in others
                )
            if len(widths) == 1 and lengths == [64] * ranks:
                check_order_by_node(shards, total, codec, levels)
            return total

        for rank, total in enumerate(on_levels(widths, ranks, run)):
            assert total.dtype == torch.float32 and total.numel() == lengths[rank]
            parts = [torch.split(values, lengths)[rank] for values in inputs]
            check_levels(total, codec, parts, widths, hops=1)


def check_order_by_node(shards: list[Tensor], total: Tensor, codec: Codec, levels: Levels) -> None:
    """Check that shards in one tensor, ordered by place in the node, have the same sums."""
    columns = [shards[row[local]] for local in range(levels.width) for row in levels.grid]
    by_node = Shards(torch.cat(columns), len(shards[0]), levels.shape)
    assert all(map(torch.equal, by_node, shards))
    assert torch.equal(calls.reduce_scatter(by_node, codec, levels).wait(), total)
    both = [torch.zeros(len(shards[0]) * levels.nodes) for _ in range(2)]
    for each, sums in zip((shards, by_node), both, strict=True):
        keep_shards(each, calls.via_of(codec, levels), sums).wait()
    assert torch.equal(*both)


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize(("widths", "ranks"), by_day(SHAPES, SHAPES[:4]), ids=str)
def test_reduce_to_owners(widths: tuple[int, ...], ranks: int, codec: Codec) -> None:
    """Owners of one range hold the same bits."""
    for ranges in owners_of(ranks):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [values_of(rank, ranges[-1].stop, dtype) for rank in range(ranks)]

            def run(
                levels: Levels,
                rank: int,
                inputs: list[Tensor] = inputs,
                ranges: list[OwnedRange] = ranges,
            ) -> list[Tensor]:
                own = inputs[rank].clone()
                sums = calls.reduce_to_owners(own, ranges, codec, levels)
                assert torch.equal(own, inputs[rank])
                return sums

            copies: dict[tuple[int, int], set[str]] = defaultdict(set)
            for rank, sums in enumerate(on_levels(widths, ranks, run)):
                mine = [(owned.start, owned.stop) for owned in ranges if rank in owned.ranks]
                for (start, stop), total in zip(mine, sums, strict=True):
                    assert total.dtype == torch.float32
                    parts = [values[start:stop] for values in inputs]
                    check_levels(total, codec, parts, widths, hops=2)
                    copies[start, stop].add(digest(total))
            assert all(len(found) == 1 for found in copies.values())


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("widths", [(2,), (2, 2), (4, 1), (1, 2), (2, 2, 1)], ids=str)
def test_all_gather_has_the_bits_of_one_level(widths: tuple[int, ...], codec: Codec) -> None:
    for numel in (0, 1, 100, 1000):
        shards = [values_of(rank, numel, torch.bfloat16) for rank in range(8)]

        def run(group: Any, rank: int, numel: int = numel, shards: Any = shards) -> Tensor:
            out = torch.zeros(8 * numel, dtype=torch.bfloat16)
            calls.all_gather(shards[rank], out, codec, group).wait()
            return out

        alone = thread_groups.run(8, run)[0]
        assert all(torch.equal(out, alone) for out in on_levels(widths, 8, run))


def test_a_gather_over_four_levels() -> None:
    """Sixteen ranks: payloads pass two levels of relays, and arrive in group order."""
    for codec in (make_codec("blockint", bits=8), make_codec("radix", error_bound=1e-2)):
        shards = [values_of(rank, 100, torch.bfloat16) for rank in range(16)]

        def run(group: Any, rank: int, codec: Codec = codec, shards: Any = shards) -> Tensor:
            out = torch.zeros(1600, dtype=torch.bfloat16)
            calls.all_gather(shards[rank], out, codec, group).wait()
            return out

        alone = thread_groups.run(16, run)[0]
        assert all(torch.equal(out, alone) for out in on_levels((2, 2, 2), 16, run))


@pytest.mark.parametrize("codec", [Identity(), make_codec("expcode"), Int8()], ids=str)
def test_whole_numbers_are_summed_as_in_one_level(codec: Codec) -> None:
    """Their fp32 sums are exact in any order, so equal the flat sum's bits; the largest is 127."""
    inputs = [torch.full((300,), float(rank % 3)) for rank in range(12)]
    for values in inputs:
        values[::10] = 127 / 12  # makes Int8's step a whole number

    def run(group: Any, rank: int) -> Tensor:
        tensor = inputs[rank].round().clone()
        calls.all_reduce(tensor, codec, group)
        return tensor

    if codec.lossless:
        alone = thread_groups.run(12, run)[0]
        assert all(torch.equal(out, alone) for out in on_levels((2, 3), 12, run))
    else:
        exact = rank_order_sum([values.round() for values in inputs])
        for out in on_levels((2, 3), 12, run):
            assert float((out - exact).abs().max()) <= bound(codec, inputs, 2)


def _processes(codec: Codec) -> dict[str, Any]:
    """Compute all sums of a job of eight ranks: two sites of two nodes of two ranks."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    nodes = discover(list(WIDTHS))
    (note,) = nodes.prepare([tuple(range(ranks))])
    assert note == (
        "three levels over 4 nodes (by compression.hierarchy): native among 2, then among 2 ranks, "
        "encoded between 2 units of 4 ranks, quantized twice at most"
    )
    group = nodes.group(None, two_levels=True)
    levels = group.levels
    assert levels is not None and levels.shape == (2, 2, 2)
    assert sorted(group.remote) == [rank for rank in range(8) if rank // 4 != me // 4]
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [values_of(rank, 1000, dtype) for rank in range(ranks)]
        tensor, meter = inputs[me].clone(), Meter()
        calls.all_reduce(tensor, codec, group, meter=meter)
        check_levels(tensor, codec, inputs, WIDTHS, hops=2)
        if codec.fixed_size:
            assert meter.inter_nbytes == between(codec, 1000, dtype, levels)
        found[f"sum {dtype}"] = digest(tensor)
        for ranges in owners_of(8):
            numel = ranges[-1].stop
            parts = [values[:numel] for values in inputs]
            sums = calls.reduce_to_owners(parts[me].clone(), ranges, codec, group)
            mine = [owned for owned in ranges if me in owned.ranks]
            for owned, total in zip(mine, sums, strict=True):
                own = [v[owned.start : owned.stop] for v in parts]
                check_levels(total, codec, own, WIDTHS, hops=2)
        total = calls.reduce_scatter(inputs[me].chunk(8), codec, group).wait()
        check_levels(total, codec, [values.chunk(8)[me] for values in inputs], WIDTHS, hops=1)
        shard, out = inputs[me][:100].clone(), torch.zeros(800, dtype=dtype)
        meter = Meter()
        calls.all_gather(shard, out, codec, group, meter=meter).wait()
        if codec.fixed_size:
            # to the other site; two payloads to the other node; four shards inside
            slot = codec.wire_nbytes(100, dtype)
            assert meter.inter_nbytes == slot
            assert meter.wire_nbytes == slot + 2 * slot + 4 * 100 * dtype.itemsize
        for rank, values in enumerate(out.view(ranks, 100)):
            error = float((values.float() - inputs[rank][:100].float()).abs().max())
            assert error <= bound(codec, [inputs[rank][:100]], hops=1)
        found[f"gather {dtype}"] = digest(out)
        cut = torch.zeros(800, dtype=dtype)  # as several parameters at once
        calls.all_gather(shard, cut, codec, group, cuts=[60]).wait()
        for rank, values in enumerate(cut.view(ranks, 100)):
            error = float((values.float() - inputs[rank][:100].float()).abs().max())
            assert error <= bound(codec, [inputs[rank][:100]], hops=1)
    several = [torch.zeros(8 * n, dtype=torch.float32) for n in (64, 4096, 9)]
    shards = [values_of(me, out.numel() // 8, torch.float32) for out in several]
    handles = [
        calls.all_gather(shard, out, codec, group, async_op=True)
        for shard, out in zip(shards, several, strict=True)
    ]
    for handle in handles:  # waited for in their order of start, the same on all ranks
        handle.wait()
    found["several"] = digest(*several)
    return found


@pytest.mark.parametrize("codec", [CODECS[0], *CODECS[3:]], ids=str)
def test_processes(on_ranks: RunRanks, codec: Codec) -> None:
    results = on_ranks(8, _processes, codec)
    assert all(found == results[0] for found in results)


def fed_back(codec: Codec, levels: Levels, me: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the given, delivered and residual values of rank ``me`` over three all_reduces."""
    numel = 1000
    start, stop = chunk_ranges(numel, levels.width)[levels.local]
    low, high = chunk_ranges(stop - start, levels.nodes)[levels.node]
    residual, owner = torch.zeros(stop - start), torch.zeros(high - low)
    given, delivered = torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(3):
        tensor = values_of(me, numel, seed=step)
        given += tensor
        calls.all_reduce(tensor, codec, levels, residual=residual, owner_residual=owner)
        if me == 0:
            delivered += tensor
    held = torch.zeros(numel).double()
    held[start:stop] += residual
    held[start + low : start + high] += owner
    return given, delivered, held


def test_nothing_is_lost() -> None:
    """The given gradients equal the delivered sums plus the residuals of all ranks."""
    for codec in (Int8(), make_codec("blockint", bits=4)):

        def run(levels: Levels, me: int, codec: Codec = codec) -> tuple[Tensor, Tensor, Tensor]:
            return fed_back(codec, levels, me)

        found = on_levels(WIDTHS, 8, run)
        given, delivered, held = (sum(part) for part in zip(*found, strict=True))
        assert float((given - delivered - held).abs().max()) <= 1e-5 * float(given.abs().max())
        assert held.abs().max() > 0


def _of_parts() -> list[Any]:
    """Use groups inside one site, over sites with one rank per node, and inside one node."""
    me = dist.get_rank()
    nodes = discover([2, 2, 2], (None, None, make_codec("bf16")))
    groups = [(0, 1, 2, 3), (4, 6), (5, 7), (0, 2, 4, 6), (1, 3, 5, 7)]
    said = nodes.prepare([group for group in groups if me in group])
    found = []
    for ranks in groups:
        made = dist.new_group(list(ranks))
        if me not in ranks:
            continue
        group = nodes.group(made, two_levels=True)
        levels = group.levels
        shape = None if levels is None else (levels.shape, [one.size for one in levels.stages])
        tensor = torch.full((64,), float(me))
        calls.all_reduce(tensor, Identity(), group)
        found.append((ranks, sorted(group.remote), shape, float(tensor[0])))
    return [said, found]


def test_groups_that_are_parts_of_the_job(on_ranks: RunRanks) -> None:
    results = on_ranks(8, _of_parts)
    (said, found), (_, last) = results[0], results[7]
    assert said == [
        "two levels over 4 nodes (by compression.hierarchy): native among 2 ranks, encoded between "
        "2 units of 2 ranks, quantized twice at most",
        # all eight ranks are in one unit of the third level
        "bf16 in level 3 of hierarchy does nothing: no group spans several units of its level in a "
        "regular grid",
    ]
    assert found == [
        ((0, 1, 2, 3), [2, 3], ((2, 2), [2]), 6.0),
        ((0, 2, 4, 6), [2, 3], ((2, 2), [2]), 12.0),
    ]
    assert last == [((5, 7), [0], None, 12.0), ((1, 3, 5, 7), [0, 1], ((2, 2), [2]), 16.0)]


def test_arrangements() -> None:
    found = arrange(units_of((2, 2), 8))
    assert isinstance(found, Arrangement)
    assert found.grid == ((0, 2, 1, 3), (4, 6, 5, 7)), "places in the last level count fastest"
    assert found.stages[0] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.stages[1] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found.widths == (2, 2) and not found.note
    assert arrange(units_of((2, 2), 4)) == arrange([[0, 0, 1, 1]]), "one site only"
    assert arrange([[0] * 4, [0] * 4]) is None and arrange([[0, 1], [0, 1]]) is None
    uneven = arrange([[0, 0, 0, 1, 2, 2, 3, 3], [0] * 4 + [1] * 4])
    assert isinstance(uneven, Arrangement) and "in one step" in uneven.note
    assert uneven.stages == (uneven.grid,) and uneven.grid == ((0, 1, 2, 3), (4, 5, 6, 7))
    other = arrange([[0, 0, 1, 1, 2, 3, 4, 5], [0] * 4 + [1] * 4])
    assert isinstance(other, Arrangement) and "in one step" in other.note
    dealt = arrange([[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert "no regular order" in str(dealt)
    assert "1 and 3 ranks" in str(arrange([[0, 0, 0, 1], [0, 0, 0, 1]]))


def _told() -> list[Any]:
    rank = dist.get_rank()
    try:
        os.environ[ADDRESS] = f"s0.s{rank // 4}.n{rank // 2}"
        found = [discover([2, "auto"]), discover([2, "auto", "auto"])]
        os.environ["GROUP_RANK"] = str(rank // 2)
        found.append(discover(["auto", 2]))
        if rank == 3:
            os.environ[ADDRESS] = "n1"
        with pytest.raises(ConfigError, match=r"compression.hierarchy: found \[2, 'auto'\]; no la"):
            discover([2, "auto"])
        os.environ[ADDRESS] = f"s{rank % 2}.n{rank // 2}"
        with pytest.raises(ConfigError, match="ranks of one unit of level 1 are on different swi"):
            discover([2, "auto"])
    finally:
        os.environ.pop("GROUP_RANK", None)
        os.environ.pop(ADDRESS, None)
    with pytest.raises(ConfigError, match=r"found \[2, 3\]; the job has 4 nodes, no multiple of 3"):
        discover([2, 3])
    with pytest.raises(ConfigError, match=r"found \[3, 2\]; the job has 8 ranks, no multiple of 3"):
        discover([3, 2])
    return [(nodes.units, nodes.source) for nodes in found]


def test_units_come_from_the_launcher(on_ranks: RunRanks) -> None:
    node, site = (0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 1, 1, 1, 1)
    expected = [
        ((node, site), "compression.hierarchy"),
        ((node, site, (0,) * 8), "compression.hierarchy"),
        ((node, site), "GROUP_RANK"),
    ]
    assert on_ranks(8, _told) == [expected] * 8


def test_the_layout_of_a_checkpoint_has_every_level() -> None:
    """Residuals are split by it: jobs with the same nodes but other sites differ."""
    plain, deep = Nodes([0, 0, 1, 1], "test"), Nodes([0, 0, 1, 1], "test", [0, 0, 0, 0])
    assert plain.layout is None and deep.layout is None, "no group in levels yet"
    for nodes in (plain, deep):
        nodes._deep = True
    assert plain.layout == [0, 0, 1, 1] and deep.layout == [[0, 0, 1, 1], [0, 0, 0, 0]]
