"""Levels with separate codecs: errors are bounded, and all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Levels, Meter, OwnedRange, Reduction, all_reduce
from hybridcomp.collectives.topology import discover
from tests.collectives import calls
from tests.collectives.common import bound, digest, rank_order_sum, values_of
from tests.collectives.hierarchical.in_threads import everywhere, units_of
from tests.ranks import RunRanks

RANKS, WIDTHS = 8, (2, 2)
OUTER = make_codec("blockint", bits=4)
EIGHT, SIX = make_codec("blockint", bits=8), make_codec("blockint", bits=6)
NUMELS = (1, 33, 1000)


def run_on(run: Any, codecs: Sequence[Codec | None]) -> list[Any]:
    return everywhere(units_of(WIDTHS, RANKS), run, codecs)


def summed(numel: int, dtype: torch.dtype, codecs: Sequence[Codec | None]) -> list[Any]:
    """Return the sum and the bytes sent on each rank."""

    def run(levels: Levels, rank: int) -> tuple[Tensor, int, int]:
        tensor, meter = values_of(rank, numel, dtype), Meter()
        calls.all_reduce(tensor, OUTER, levels, meter=meter).wait()
        return tensor, meter.wire_nbytes, meter.inter_nbytes

    return run_on(run, codecs)


def limit(inputs: Sequence[Tensor], codecs: Sequence[Codec | None], hops: int) -> float:
    """Return the error bound: each level's codec for its encodings, then the codec between."""
    values, noise = [each.float() for each in inputs], 0.0
    for width, codec in zip(WIDTHS, codecs, strict=True):
        rows = [values[i : i + width] for i in range(0, len(values), width)]
        if codec is not None:
            noise += sum(bound(codec, [v.abs() + noise for v in row], 1) for row in rows)
        values = [rank_order_sum(list(row)) for row in rows]
    return noise + bound(OUTER, [total.abs() + noise for total in values], hops)


@pytest.mark.parametrize("codecs", [(None, EIGHT), (EIGHT, SIX), (SIX, None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_all_reduce_is_within_its_bound_on_every_rank(
    dtype: torch.dtype, codecs: tuple[Codec | None, ...]
) -> None:
    for numel in NUMELS:
        found = [tensor for tensor, _, _ in summed(numel, dtype, codecs)]
        inputs = [values_of(rank, numel, dtype) for rank in range(RANKS)]
        assert len({digest(tensor) for tensor in found}) == 1
        exact = rank_order_sum([each.float() for each in inputs])
        rounding = float(exact.abs().max()) * torch.finfo(dtype).eps
        error = float((found[0].float() - exact).abs().max())
        assert error <= limit(inputs, codecs, 2) + rounding
    native = summed(NUMELS[-1], dtype, ())[0][0]
    assert not torch.equal(native, found[0]), "the level has a codec"


def test_a_lossless_level_changes_no_bit_and_sends_less_inside_a_site() -> None:
    native = summed(4096, torch.bfloat16, ())
    exact = summed(4096, torch.bfloat16, (None, make_codec("expcode")))
    coarse = summed(4096, torch.bfloat16, (None, EIGHT))
    for (right, whole, far), (found, _, there), (_, fewer, same) in zip(
        native, exact, coarse, strict=True
    ):
        assert torch.equal(right, found) and far == there == same
        # half of its chunk of 2048 fp32 sums goes to the other node of the site
        assert whole - fewer == 1024 * 4 - EIGHT.wire_nbytes(1024, torch.float32)


def test_reduce_scatters_and_owners() -> None:
    lengths = [100, 0, 7, 333, 64, 64, 1, 31]
    inputs = [values_of(rank, sum(lengths), torch.float32) for rank in range(RANKS)]
    exact = torch.split(rank_order_sum(inputs), lengths)
    ranges = [OwnedRange(0, 300, (6,)), OwnedRange(300, 600, (3, 4))]
    codecs = (None, EIGHT)

    def run(levels: Levels, rank: int) -> tuple[Tensor, list[Tensor]]:
        shards = torch.split(inputs[rank], lengths)
        shard = calls.reduce_scatter(shards, OUTER, levels).wait()
        return shard, calls.reduce_to_owners(inputs[rank], ranges, OUTER, levels)

    most, whole = limit(inputs, codecs, 2), torch.cat(exact)
    for rank, (shard, owned) in enumerate(run_on(run, codecs)):
        assert shard.numel() == lengths[rank]
        if lengths[rank]:
            assert float((shard - exact[rank]).abs().max()) <= most
        mine = [each for each in ranges if rank in each.ranks]
        for one, total in zip(mine, owned, strict=True):
            assert float((total - whole[one.start : one.stop]).abs().max()) <= most


def _discovered() -> tuple[list[str], str, list[str]]:
    """Return the log of a job of two sites of two nodes, its sum, and the codecs used."""
    nodes, meter = discover([2, 2], (None, EIGHT)), Meter()
    notes = nodes.prepare([tuple(range(RANKS))])
    tensor = values_of(dist.get_rank(), 1000, torch.float32)
    group = nodes.group(None, two_levels=True)
    all_reduce(tensor, Reduction(OUTER, group, meter)).wait()
    return notes, digest(tensor), sorted(meter.used)


def test_processes_find_the_codecs_of_their_levels(on_ranks: RunRanks) -> None:
    found = on_ranks(RANKS, _discovered)
    expected = digest(summed(1000, torch.float32, (None, EIGHT))[0][0])
    told = (
        "native among 2, then blockint(bits=8) among 2 ranks, encoded between 2 units of 4 ranks, "
        "quantized 3 times at most, twice of these between the units"
    )
    for notes, total, used in found:
        assert notes == [f"three levels over 4 nodes (by compression.hierarchy): {told}"]
        assert total == expected and used == sorted({OUTER.spec, EIGHT.spec})
