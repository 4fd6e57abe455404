"""Error bounds hold for every element: random groups, dtypes, distributions, collectives."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import Bounded
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.codecs.budget import FLOOR, Mode
from hybridcomp.collectives import Meter, OwnedRange, chunk_ranges
from hybridcomp.collectives.owner_plan import plan_of
from tests.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    recv,
    reduce_scatter,
    reduce_to_owners,
    send,
)
from tests.collectives.hierarchical.in_threads import deep_groups, units_of
from tests.collectives.oracle import Promise, check
from tests.selection import by_day
from tests.stand_ins import thread_groups

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
#: groups of every kind; nightly: over a million blocks of 16 values each
ROUNDS = 400 if NIGHTLY else 3
FIRST = int(os.environ.get("HYBRIDCOMP_SEED", "0"))

SHAPES = ("normal", "outliers", "heavy", "sparse", "levels", "zero", "same", "steps")


def sample(rng: np.random.Generator, numel: int, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return values of one rank: random shape and scale, sometimes with NaN or Inf."""
    info = torch.finfo(dtype)
    shape = SHAPES[rng.integers(len(SHAPES))]
    values = rng.standard_normal(numel)
    if shape == "outliers":
        values[rng.random(numel) < 0.01] *= 10.0 ** rng.integers(1, 7)
    elif shape == "heavy":
        values = rng.standard_t(1.2, numel)
    elif shape == "sparse":
        values[rng.random(numel) < 0.9] = 0.0
    elif shape == "levels":
        values = np.round(values * 2)
    elif shape == "zero":
        values[:] = 0.0
    elif shape == "same":
        values[:] = values[0] if numel else 0.0
    elif shape == "steps":  # scales that change along the message
        values *= 10.0 ** rng.integers(-12, 4, numel // 100 + 1).repeat(100)[:numel]
    if rng.random() < 0.3:  # tiny, subnormal, huge
        low, high = np.log2(info.smallest_normal * info.eps), np.log2(info.max / ranks / 8)
        ends = (low + rng.uniform(0, 30), high - rng.uniform(0, 10), rng.uniform(low, high))
        values *= 2.0 ** ends[rng.integers(3)]
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(np.clip(values, -info.max, info.max)).to(dtype)
    if rng.random() < 0.2 and numel:
        places = rng.integers(0, numel, rng.integers(1, 4))
        tensor[places] = float(("nan", "inf", "-inf")[rng.integers(3)])
    return tensor


def values_of(rng: np.random.Generator, ranks: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Return values of all ranks, which sometimes nearly cancel."""
    values = [sample(rng, numel, dtype, ranks) for _ in range(ranks)]
    if ranks > 1 and rng.random() < 0.15:
        values[-1] = (-values[0].float() * (1 + 1e-3 * rng.standard_normal())).to(dtype)
    return values


def promises(rng: np.random.Generator, feedback: bool = False) -> tuple[Bounded, Promise, bool]:
    """Return a bound, its oracle, and whether a NaN may spoil its neighbours.

    ``feedback``: fp16 messages travel as fp32, which has values below the floor.
    """
    family = ("auto", "auto", "radix", "blockint", "zfp", "fp8")[rng.integers(6)]
    fixed = family in ("blockint", "zfp", "fp8")
    low = {"blockint": -1.5, "fp8": -0.9, "zfp": -4.0}.get(family, -5.5)
    bound = float(10 ** rng.uniform(low, -0.5))
    segment = 4096 if fixed else int((64, 256, 1008, 4096)[rng.integers(4)])
    if not fixed and rng.random() < 0.25:
        absolute = float(10 ** rng.uniform(-6, 3))
        found = Bounded(absolute, "abs", segment, family)
        return found, Promise(absolute, "abs", segment), False
    # auto takes blockint for fp16
    return (
        Bounded(bound, "rel", segment, family),
        Promise(bound, "rel", segment, FLOOR if fixed or feedback else 0.0),
        fixed or family == "auto",
    )


def cuts_of(rng: np.random.Generator, numel: int) -> list[int]:
    """Draw the borders of parameters."""
    return sorted({int(c) for c in rng.integers(0, numel + 1, rng.integers(0, 6))})


def numel_of(rng: np.random.Generator) -> int:
    """Draw a size from zero to a few segments per rank."""
    return int((0, 1, 7, 33, 500, 5000, 30000)[rng.integers(7)] * rng.uniform(0.5, 1.5))


def chunk_edges(numel: int, encoders: int) -> list[int]:
    """Return the chunk borders of an all_reduce; two ranks do not split the work."""
    return [start for start, _ in chunk_ranges(numel, encoders)] if encoders != 2 else []


def keeps(codec: Bounded, dtype: torch.dtype, count: int) -> bool:
    """Return whether the bound leaves room to quantize; native sums have no smaller error."""
    hops = codec.for_message(1 << 20, dtype, 2).split_error_budget(count, 8, result=dtype)
    return dtype == torch.float32 or count == 1 or not hops[0].lossless


def same_bits(left: Tensor, right: Tensor) -> bool:
    whole = torch.int32 if left.dtype == torch.float32 else torch.int16
    return torch.equal(left.view(whole), right.view(whole))


#: each case draws its message by its seed and its number of ranks
rounds = pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))


@rounds
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_all_reduce(seed: int, ranks: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([seed, ranks])
    codec, promise, vanish = promises(rng)
    numel = numel_of(rng)
    cuts, values = cuts_of(rng, numel), values_of(rng, ranks, numel, dtype)

    def one(group: Any, rank: int) -> Tensor:
        tensor = values[rank].clone()
        chosen = codec.for_message(numel, dtype, ranks)
        all_reduce(tensor, chosen, group, cuts=cuts, async_op=True).wait()
        return tensor

    results = thread_groups.run(ranks, one)
    assert all(same_bits(r, results[0]) for r in results)
    if keeps(codec, dtype, 2):
        edges = [*cuts, *chunk_edges(numel, ranks)]
        check(results[0], values, edges, promise, blocks_may_vanish=vanish)


@rounds
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_reduce_scatter(seed: int, ranks: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([seed, ranks])
    codec, promise, vanish = promises(rng)
    numels = [numel_of(rng) for _ in range(ranks)]
    cuts = [cuts_of(rng, numel) for numel in numels]
    values = values_of(rng, ranks, sum(numels), dtype)

    def one(group: Any, rank: int) -> Tensor:
        shards = torch.split(values[rank], numels)
        chosen = codec.for_message(sum(numels), dtype, ranks)
        return reduce_scatter(shards, chosen, group, cuts=cuts).wait()

    for rank, total in enumerate(thread_groups.run(ranks, one)):
        parts = [torch.split(v, numels)[rank] for v in values]
        check(total, parts, cuts[rank], promise, blocks_may_vanish=vanish)


def ranges_of(rng: np.random.Generator, numel: int, ranks: int) -> list[OwnedRange]:
    """Draw owners of slices: few slices are balanced, even ones direct; some have two owners."""
    borders = sorted({0, numel, *rng.integers(0, numel + 1, rng.integers(0, 5)).tolist()})
    if rng.random() < 0.5:
        return [OwnedRange(a, b, (r,)) for r, (a, b) in enumerate(chunk_ranges(numel, ranks))]
    return [
        OwnedRange(a, b, tuple(sorted({int(o) for o in rng.integers(0, ranks, 2)})))
        for a, b in pairwise(borders)
    ]


@rounds
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_reduce_to_owners(seed: int, ranks: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([seed, ranks])
    codec, promise, vanish = promises(rng)
    numel = max(1, numel_of(rng))
    ranges, cuts = ranges_of(rng, numel, ranks), cuts_of(rng, numel)
    values = values_of(rng, ranks, numel, dtype)

    def one(group: Any, rank: int) -> list[Tensor]:
        chosen = codec.for_message(numel, dtype, ranks)
        return reduce_to_owners(values[rank], ranges, chosen, group, cuts=cuts)

    # neighbours of the same owners travel together
    edges = [*cuts, *(b.start for a, b in pairwise(ranges) if a.ranks != b.ranks)]
    hops = 1
    if plan_of(tuple(ranges), ranks).kind == "balanced":
        edges += [start for start, _ in chunk_ranges(numel, ranks)]
        hops = 2
    if not keeps(codec, dtype, hops):
        return
    for rank, sums in enumerate(thread_groups.run(ranks, one)):
        owned = [o for o in ranges if rank in o.ranks]
        for found, total in zip(owned, sums, strict=True):
            check(total, values, edges, promise, start=found.start, blocks_may_vanish=vanish)


@rounds
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 5])
def test_moves(seed: int, ranks: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([seed, ranks])
    codec, promise, vanish = promises(rng)
    numel = numel_of(rng)
    values = values_of(rng, ranks, numel, dtype)
    splits = rng.multinomial(numel, np.full(ranks, 1 / ranks)).tolist()

    def one(group: Any, rank: int) -> tuple[Tensor, list[Tensor], Tensor]:
        chosen = codec.for_message(numel, dtype, ranks)
        gathered = torch.zeros(ranks * numel, dtype=dtype)
        shard, meter = values[rank], Meter()
        first = all_gather(shard, gathered, chosen, group, meter=meter, async_op=True)
        swapped = torch.zeros(ranks * splits[rank], dtype=dtype)
        takes = [splits[rank]] * ranks
        second = all_to_all(
            swapped, shard, chosen, group, meter=meter, out_splits=takes, in_splits=splits,
            async_op=True,
        )  # fmt: skip
        first.wait()
        second.wait()
        passed = torch.zeros(numel, dtype=dtype)
        send(shard, (rank + 1) % ranks, chosen, group, meter=meter)
        recv(passed, (rank - 1) % ranks, chosen, group, meter=meter)
        return gathered, list(torch.split(swapped, takes)), passed

    results = thread_groups.run(ranks, one)
    for rank, (gathered, swapped, passed) in enumerate(results):
        assert same_bits(gathered, results[0][0])
        for source, part in enumerate(gathered.view(ranks, -1)):
            check(part, [values[source]], [], promise, blocks_may_vanish=vanish)
        for source, part in enumerate(swapped):
            sent = torch.split(values[source], splits)[rank]
            check(part, [sent], [], promise, blocks_may_vanish=vanish)
        before = values[(rank - 1) % ranks]
        check(passed, [before], [], promise, blocks_may_vanish=vanish)


@rounds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_error_feedback(seed: int, ranks: int, dtype: torch.dtype) -> None:
    """The bound applies to values plus residuals; the owner's residual counts as another rank.

    Runs three steps from a random residual.
    """
    rng = np.random.default_rng([seed, ranks])
    codec, promise, vanish = promises(rng, feedback=True)
    numel = numel_of(rng)
    cuts, chunks = cuts_of(rng, numel), chunk_ranges(numel, ranks)
    steps = [values_of(rng, ranks, numel, dtype) for _ in range(3)]
    residuals = [torch.from_numpy(rng.standard_normal(numel) * 0.1).float() for _ in range(ranks)]
    owners = [torch.zeros(stop - start) for start, stop in chunks]
    edges = [*cuts, *chunk_edges(numel, ranks)]
    for values in steps:
        wanted = [v.float() + r for v, r in zip(values, residuals, strict=True)]
        wanted.append(torch.cat(owners))

        def one(group: Any, rank: int, values: list[Tensor] = values) -> Tensor:
            tensor = values[rank].clone()
            chosen = codec.for_message(numel, dtype, ranks)
            all_reduce(
                tensor, chosen, group, cuts=cuts, residual=residuals[rank],
                owner_residual=owners[rank],
            )  # fmt: skip
            return tensor

        result = thread_groups.run(ranks, one)[0]
        if keeps(codec, dtype, 2):
            check(result, wanted, edges, promise, blocks_may_vanish=vanish)


@rounds
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 4), (2, 2, 2), (3, 2, 2)], ids=str)
def test_hierarchy(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check (nodes, ranks per node): native sums inside nodes, encoded between nodes.

    With (sites, nodes, ranks) only messages between sites are encoded.
    """
    rng = np.random.default_rng([seed, sum(shape)])
    nodes, *widths = shape
    width = math.prod(widths)
    ranks = nodes * width
    codec, promise, vanish = promises(rng)
    numel = numel_of(rng)
    values = values_of(rng, ranks, numel, dtype)
    numels = [numel_of(rng) for _ in range(ranks)]
    shards = values_of(rng, ranks, sum(numels), dtype)
    parts = [(a, [a + b for b in chunk_edges(z - a, nodes)]) for a, z in chunk_ranges(numel, width)]
    _, levels_of, boards = deep_groups(units_of(widths[::-1], ranks))

    def one(_: object, rank: int) -> tuple[Tensor, Tensor]:
        levels = levels_of(rank)
        tensor = values[rank].clone()
        chosen = codec.for_message(numel, dtype, ranks)
        all_reduce(tensor, chosen, levels)
        own = torch.split(shards[rank], numels)
        chosen = codec.for_message(sum(numels), dtype, ranks)
        return tensor, reduce_scatter(own, chosen, levels).wait()

    results = thread_groups.run(ranks, one, boards)
    assert all(same_bits(tensor, results[0][0]) for tensor, _ in results)
    if keeps(codec, dtype, 2):
        edges = [edge for start, inside in parts for edge in (start, *inside)]
        check(results[0][0], values, edges, promise, blocks_may_vanish=vanish)
    if not keeps(codec, dtype, 2):  # a native sum inside a node is also limited by its dtype
        return
    for rank, (_, total) in enumerate(results):
        given = [torch.split(v, numels)[rank] for v in shards]
        check(total, given, [], promise, blocks_may_vanish=vanish)


@pytest.mark.parametrize("mode", ["rel", "abs"])
@pytest.mark.parametrize("ranks", by_day([2, 5, 8], [2, 5]))
def test_errors_that_add_up(ranks: int, mode: Mode) -> None:
    """All ranks have the same values and errors, so nothing averages out."""
    bound = 0.02
    codec, promise = Bounded(bound, mode), Promise(bound, mode)
    rows = [torch.full((4096,), bound * part) for part in np.linspace(0.01, 3.0, 150)]
    for row in rows:
        row[0] = 1.0  # reference of a relative bound
    values = [torch.cat(rows)] * ranks
    cuts = list(range(0, values[0].numel(), 4096))

    def one(group: Any, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        reduced, meter = values[rank].clone(), Meter()
        all_reduce(reduced, codec, group, meter=meter, cuts=cuts)
        shards = [values[rank], *[values[rank][:0]] * (ranks - 1)]
        only = [cuts, *[[]] * (ranks - 1)]
        scattered = reduce_scatter(shards, codec, group, meter=meter, cuts=only).wait()
        everyone = [OwnedRange(0, len(reduced), tuple(range(ranks)))]
        return (
            reduced,
            scattered,
            reduce_to_owners(values[rank], everyone, codec, group, meter=meter, cuts=cuts),
        )

    results = thread_groups.run(ranks, one)
    edges = [*cuts, *chunk_edges(len(values[0]), ranks)]
    check(results[0][0], values, edges, promise)
    check(results[0][1], values, cuts, promise)
    for *_, (total,) in results:
        check(total, values, edges, promise)


@pytest.mark.parametrize("family", ["auto", "radix", "blockint", "bf16"])
def test_a_sum_that_overflows_fp16_is_seen(family: str) -> None:
    """It comes out as Inf or NaN, like native's Inf: loss scaling depends on it."""
    values = [torch.full((1000,), 100.0, dtype=torch.float16) for _ in range(3)]
    for tensor in values:
        tensor[::100] = 30000.0

    def one(group: Any, rank: int) -> Tensor:
        tensor = values[rank].clone()
        all_reduce(tensor, Bounded(0.1, family=family), group)
        return tensor

    for result in thread_groups.run(3, one):
        assert not result[::100].isfinite().any()
