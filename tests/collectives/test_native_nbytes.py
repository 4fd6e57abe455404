"""Native collectives: equal results with the identity codec, and their bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridcomp.collectives import Meter, native_nbytes
from tests.collectives.calls import all_gather, all_reduce, all_to_all
from tests.collectives.calls import reduce_scatter as our_reduce_scatter
from tests.collectives.common import values_of
from tests.ranks import RunRanks
from tests.stand_ins.plain_codecs import Identity


def _against_native() -> None:
    """Compare on two ranks, where summation order does not matter."""
    me, codec = dist.get_rank(), Identity()
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = values_of(me, 1000, dtype), values_of(me, 1000, dtype)
        all_reduce(ours, codec, None, meter=Meter())
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs)
        values = values_of(me, 1000, dtype, seed=1)
        parts = [torch.zeros_like(values) for _ in range(2)]
        gathered = torch.zeros(2000, dtype=dtype)
        all_gather(values, gathered, codec, None, meter=Meter())
        dist.all_gather(parts, values)
        assert torch.equal(gathered, torch.cat(parts))
        ours, theirs = torch.zeros_like(values), torch.zeros_like(values)
        all_to_all(ours, values, codec, None, meter=Meter())
        dist.all_to_all_single(theirs, values)
        assert torch.equal(ours, theirs)
    shards = [values_of(me, 100, seed=2), values_of(me, 100, seed=3)]
    total = our_reduce_scatter(shards, codec, None, meter=Meter()).wait()
    output = torch.zeros(100)
    dist.reduce_scatter(output, shards)
    assert torch.equal(total, output)


def test_identity_equals_native(on_ranks: RunRanks) -> None:
    on_ranks(2, _against_native)


def test_native_bytes() -> None:
    assert native_nbytes.all_reduce_nbytes(1000, torch.float32, 4) == 6000
    assert native_nbytes.all_reduce_nbytes(1000, torch.bfloat16, 2) == 2000
    assert native_nbytes.reduce_scatter_nbytes(1000, torch.float32, 4) == 3000
    assert native_nbytes.all_gather_nbytes(250, torch.float32, 4) == 3000
    assert native_nbytes.all_to_all_nbytes(1000, torch.float16, 4) == 1500
    assert native_nbytes.send_nbytes(1000, torch.float16) == 2000


def test_one_rank_sends_nothing() -> None:
    for nbytes in (
        native_nbytes.all_reduce_nbytes,
        native_nbytes.reduce_scatter_nbytes,
        native_nbytes.all_gather_nbytes,
        native_nbytes.all_to_all_nbytes,
    ):
        assert nbytes(1000, torch.float32, 1) == 0
