"""Reduce-scatters split at cuts take two launches and give the CPU's bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual
from hybridcomp.collectives import Meter
from tests.codecs import arrays
from tests.collectives.calls import reduce_scatter
from tests.kernels.cuda.emulated import (
    Compared,
    Step,
    blockint,
    both_ways,
    build_blockint,
    count_of,
)
from tests.ranks import RunRanks


def cut_scatter(chunk: int, bits: int, cuts: list[int]) -> Compared:
    """Reduce-scatter twice with ``cuts``; ``bits``: the residual's, 0 for none."""
    codec, rank, world = blockint({"bits": 4}), dist.get_rank(), dist.get_world_size()
    values = arrays.make("normal", world * chunk - 96, rank, torch.bfloat16)
    shards = torch.split(values, chunk)
    rows = [cuts if i != 1 else cuts[:1] for i in range(world)]

    def begin() -> Step:
        residual, kept = arrays.make("normal", values.numel(), 50 + rank) / 100, list[Any]()
        if bits == 32:
            kept = list(torch.split(residual, chunk))
        elif bits:
            step = -(-chunk // 32) * 32
            few = QuantizedResidual(bits, world * step, values.device)
            kept = [few[i * step : i * step + each.numel()] for i, each in enumerate(shards)]
            for one, each in zip(kept, torch.split(residual, chunk), strict=True):
                one.pack(each)

        def step_of(number: int) -> list[Residual]:
            meter = Meter()
            done = reduce_scatter(
                shards, codec, None, meter=meter, residuals=kept or None, cuts=rows
            )
            return [done.wait(), *kept, count_of(meter)]

        return step_of

    return both_ways(begin)


#: elements of a shard, bits of its residual (0: none), cuts; low-bit residuals have blocks
CHUNKS = [
    (2400, 0, [40, 1100]), (2405, 0, [40, 1100]), (2405, 32, [40, 1100]),
    (2400, 8, [64, 1088]), (2400, 16, [32]),
]  # fmt: skip
#: cuts inside of blocks of a residual, which is fp32 within the message: the first sum is the CPU's
INSIDE = (2400, 8, [40, 1100])


def every_cut_scatter() -> list[Compared]:
    return [cut_scatter(*each) for each in (*CHUNKS, INSIDE)]


def test_a_reduce_scatter_with_cuts_takes_two_launches(on_ranks: RunRanks) -> None:
    """For any number of cuts and ranks; bits, residuals and bytes equal the CPU's."""
    build_blockint({"bits": 4})
    for *found, (inside, _) in on_ranks(3, every_cut_scatter):
        assert (0, 0) not in inside
        for asked, (different, kernels) in zip(CHUNKS, found, strict=True):
            assert not different, (asked, different)
            feedback = "_feedback" if asked[1] else ""
            wanted = [f"planned_{each}{feedback}_bf16" for each in ("encode", "sum")]
            assert kernels == wanted, asked
