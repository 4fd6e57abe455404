"""Ring attention over NCCL: the dense model's results, lossless codecs, sizes that vary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.nn import gather, ring_attention, shard
from tests.nccl.common import DEVICE, MARKS
from tests.nccl.pool import NcclPool
from tests.nn.dense import Case, inputs
from tests.nn.test_ring import errors, with_block

pytestmark = MARKS

BLOCKS: tuple[Any, ...] = (None, "none", "expcode", {"codec": "blockint", "bits": 8})


def attend(device: str, dtype: torch.dtype) -> list[tuple[bool, float]]:
    """Return, by setting, whether the bits equal the native ring's, and the largest error."""
    case = Case(length=192, width=64, heads=4, kept=2, dtype=dtype)
    native, found = None, []
    for setting in BLOCKS:
        with_block(None if setting is None else {"cp": setting})
        q, k, v = (shard(t, dim=2).to(device).requires_grad_() for t in inputs(case)[:3])
        out = ring_attention(q, k, v)
        out.backward(shard(inputs(case)[3], dim=2).to(device))  # type: ignore[no-untyped-call]
        parts = [out, *(leaf.grad for leaf in (q, k, v))]
        whole = [gather(t, dim=2).cpu() for t in parts if t is not None]
        native = whole if native is None else native
        same = all(torch.equal(a, b) for a, b in zip(whole, native, strict=True))
        found.append((same, max(errors(case, whole))))
    with_block(None)
    assert dist.is_initialized()
    return found


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_ring_over_nccl(dtype: torch.dtype, limit: float) -> None:
    with NcclPool(3, device=DEVICE) as pool:
        for native, none, lossless, lossy in pool.run(attend, DEVICE, dtype, timeout=240):
            assert native[1] <= limit
            assert none[0] and lossless[0]
            assert not lossy[0] and lossy[1] <= 4e-2
