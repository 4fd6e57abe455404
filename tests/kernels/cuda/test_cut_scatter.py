"""Reduce-scatters split at cuts take two launches and give the CPU's bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.codecs import BlockInt, make_codec
from hybridcomp.codecs.quantized_residual import QuantizedResidual, as_fp32
from hybridcomp.collectives import Meter
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.fused import blockint_macros
from tests.codecs import arrays
from tests.collectives.calls import reduce_scatter
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import emulated
from tests.kernels.cuda.test_table import Counting
from tests.ranks import RunRanks


def cut_scatter(
    fused: bool, chunk: int, bits: int, cuts: list[int]
) -> tuple[list[torch.Tensor], list[str]]:
    """Return sum and residual of two reduce-scatters with cuts, and the second one's launches."""
    torch.set_num_threads(1)
    codec, rank, world = make_codec("blockint", bits=4), dist.get_rank(), dist.get_world_size()
    values, launcher = arrays.make("normal", world * chunk - 96, rank, torch.bfloat16), Counting()
    shards = torch.split(values, chunk)
    rows = [cuts if i != 1 else cuts[:1] for i in range(world)]
    kept: list[Any] | None = None
    residual = arrays.make("normal", values.numel(), 50 + rank) / 100
    if bits == 32:
        kept = list(torch.split(residual, chunk))
    elif bits:
        step = -(-chunk // 32) * 32
        few = QuantizedResidual(bits, world * step, values.device)
        kept = [few[i * step : i * step + each.numel()] for i, each in enumerate(shards)]
        for one, each in zip(kept, torch.split(residual, chunk), strict=True):
            one.pack(each)
    found = []
    with kernels_replaced(CudaKernels(launcher)) if fused else nullcontext():
        for _ in range(2):
            launcher.kernels.clear()
            meter = Meter()
            done = reduce_scatter(shards, codec, None, meter=meter, residuals=kept, cuts=rows)
            found += [done.wait(), torch.tensor([meter.wire_nbytes])]
    return [*found, *(as_fp32(left) for left in kept or ())], launcher.kernels


#: elements of a shard, bits of its residual (0: none), cuts; low-bit residuals have blocks
CHUNKS = [
    (2400, 0, [40, 1100]), (2405, 0, [40, 1100]), (2405, 32, [40, 1100]),
    (2400, 8, [64, 1088]), (2400, 16, [32]),
]  # fmt: skip


def every_cut_scatter(fused: bool) -> list[tuple[list[torch.Tensor], list[str]]]:
    """``cut_scatter`` of all CHUNKS."""
    return [cut_scatter(fused, *each) for each in CHUNKS]


def test_a_reduce_scatter_with_cuts_takes_two_launches(on_ranks: RunRanks) -> None:
    """For any number of cuts and ranks; bits, residuals and bytes equal the CPU's."""
    macros = blockint_macros(BlockInt(bits=4)._setting)
    for source in ("blockint_table.cu", "blockint_sum.cu"):
        emulated(source, *macros)
    right = on_ranks(3, every_cut_scatter, False)
    for expected, found in zip(right, on_ranks(3, every_cut_scatter, True), strict=True):
        for asked, (sums, _), (fused, kernels) in zip(CHUNKS, expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(sums, fused, strict=True)), asked
            names = [kernel.split()[0] for kernel in kernels]
            feedback = "_feedback" if asked[1] else ""
            assert names == [f"planned_{each}{feedback}_bf16" for each in ("encode", "sum")], asked


def between_blocks(fused: bool) -> torch.Tensor:
    """Return the first sum with an 8-bit residual whose blocks the cuts split."""
    found, _ = cut_scatter(fused, 2400, 8, [40, 1100])
    return found[0]


def test_cuts_inside_of_blocks_of_a_residual(on_ranks: RunRanks) -> None:
    """It is fp32 within the message; payloads and sums have the CPU's bits."""
    right = on_ranks(3, between_blocks, False)
    for expected, found in zip(right, on_ranks(3, between_blocks, True), strict=True):
        assert torch.equal(expected, found)
