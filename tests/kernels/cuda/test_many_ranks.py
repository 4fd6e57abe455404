"""Sums over more ranks than fit a kernel's ring equal the CPU's, in rank order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import BlockInt
from hybridcomp.kernels.cuda.fused import FusedBlockInt
from tests.codecs import arrays
from tests.kernels.cuda.common import payload_of
from tests.kernels.cuda.emulated import EmulatedLauncher, blockint

NUMEL = 2 * 1024 + 1000  # neither the last tile nor the last group of 64 values is full
KINDS = ("normal", "outliers", "sparse", "subnormal", "normal")
#: special values, once each: sums of several would be Inf or NaN nearly everywhere
RARE = {1: "wide", 2: "nonfinite", 3: "near max"}


def contributions(
    codec: BlockInt, ranks: int, me: int, own: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the others' payloads, and the fp32 sum in rank order with ``own`` in its place."""
    payloads, total = [], torch.full((NUMEL,), -0.0) if start is None else start
    for rank in range(ranks):
        if rank == me:
            total = total + own
            continue
        kind = RARE.get(rank, KINDS[rank % len(KINDS)])
        payloads.append(payload_of(codec, arrays.make(kind, NUMEL, rank)))
        decoded = torch.empty(NUMEL)
        codec.decode(payloads[-1], decoded)
        total = total + decoded
    return torch.cat(payloads), total


@pytest.mark.parametrize(("ranks", "me"), [(2, 1), (5, 4), (11, 0), (40, 17)])
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"bits": 8}, torch.float32), ({"bits": 4}, torch.bfloat16),
        ({"bits": 3, "rotate": True}, torch.float16),
        ({"bits": 4, "levels": "gaussian"}, torch.float32),
        ({"bits": 4, "levels": "lloyd"}, torch.bfloat16),
        ({"bits": 4, "rounding": "random"}, torch.float32),
    ],
)  # fmt: skip
def test_sums_are_the_cpus(
    settings: dict[str, Any], dtype: torch.dtype, ranks: int, me: int
) -> None:
    codec = blockint(settings)
    fused = FusedBlockInt(EmulatedLauncher(), codec._setting)
    own, residual = arrays.make("normal", NUMEL, 99, dtype), arrays.make("normal", NUMEL, 98)
    payloads, total = contributions(codec, ranks, me, own.float())
    _, with_residual = contributions(codec, ranks, me, residual + own.float())
    found, found_with, encoded = torch.empty(NUMEL), torch.empty(NUMEL), payload_of(codec, total)
    assert total.isfinite().float().mean() > 0.5
    fused.sum(payloads, own, ranks, me, found)
    left = residual.clone()
    fused.sum(payloads, own, ranks, me, found_with, left)
    out = torch.full_like(encoded, 0xA5)
    fused.reduce(payloads, own, ranks, me, out)
    assert torch.equal(arrays.bits_of(found), arrays.bits_of(total))
    assert torch.equal(arrays.bits_of(found_with), arrays.bits_of(with_residual))
    assert not left.any()
    begun = arrays.make("normal", NUMEL, 97)
    _, further = contributions(codec, ranks, me, own.float(), begun.clone())
    fused.sum(payloads, own, ranks, me, begun, begin=begun)
    assert torch.equal(arrays.bits_of(begun), arrays.bits_of(further))
    if dtype != torch.float16:  # its overflow is encoded as Inf
        assert torch.equal(out, encoded)
