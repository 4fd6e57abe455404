"""broadcast and reduce, encoded and native."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import (
    Group,
    Meter,
    Transfer,
    broadcast,
    broadcast_native,
    reduce,
    reduce_native,
)
from hybridcomp.errors import CodecError
from tests.collectives.common import CODECS, DAY, DTYPES, bound, digest, rank_order_sum, values_of
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins.plain_codecs import Int8

NUMELS = (0, 1, 33, 4096 + 7)


def _broadcasts(codec: Codec) -> list[str]:
    """Return digests of this rank's results; only the root counts bytes."""
    group, digests = Group.of(None), []
    for dtype in DTYPES:
        for numel in NUMELS:
            for root in range(group.size):
                sent, meter = values_of(root, numel, dtype), Meter()
                values = sent.clone() if group.rank == root else None
                out = torch.zeros(numel, dtype=dtype)
                broadcast(values, out, root, Transfer(codec, group, meter))
                if values is not None:
                    assert torch.equal(values, sent)
                if codec.lossless:
                    assert torch.equal(out, sent)
                elif numel:
                    error = float((out.float() - sent.float()).abs().max())
                    assert error <= bound(codec, [sent], hops=1)
                if codec.fixed_size:
                    nbytes = (group.size - 1) * codec.wire_nbytes(numel, dtype)
                    assert meter.wire_nbytes == (nbytes if group.rank == root else 0)
                digests.append(digest(out))
    return digests


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_broadcast(on_ranks: RunRanks, ranks: int, codec: Codec) -> None:
    results = on_ranks(ranks, _broadcasts, codec)
    assert results[0] and all(result == results[0] for result in results)


def _reductions(codec: Codec) -> None:
    """Check the root's sum: within the bound, its own values exact, in rank order if lossless."""
    group = Group.of(None)
    for dtype in DTYPES:
        for numel in NUMELS:
            for root in range(group.size):
                every = [values_of(rank, numel, dtype) for rank in range(group.size)]
                out = torch.zeros(numel) if group.rank == root else None
                values, meter = every[group.rank].clone(), Meter()
                reduce(values, out, root, Transfer(codec, group, meter))
                assert torch.equal(values, every[group.rank])
                if codec.fixed_size:
                    nbytes = codec.wire_nbytes(numel, dtype) if group.size > 1 else 0
                    assert meter.wire_nbytes == (0 if group.rank == root else nbytes)
                if out is None or not numel:
                    continue
                expected = rank_order_sum(every)
                if codec.lossless or group.size == 1:
                    assert torch.equal(out, expected)
                else:
                    others = [v for rank, v in enumerate(every) if rank != root]
                    most = bound(codec, others, hops=1) + float(expected.abs().max()) * 2.0**-20
                    assert float((out - expected).abs().max()) <= most


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_reduce(on_ranks: RunRanks, ranks: int, codec: Codec) -> None:
    on_ranks(ranks, _reductions, codec)


def _native() -> None:
    """Natively any floating dtype is summed in rank order and counted."""
    group = Group.of(None)
    for dtype in (*DTYPES, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        for root in range(group.size):
            every = [values_of(rank, 33).to(dtype) for rank in range(group.size)]
            sent, meter = every[group.rank].clone(), Meter()
            broadcast_native(sent, root, group, meter)
            assert torch.equal(sent, every[root])
            nbytes = 33 * dtype.itemsize
            assert meter.wire_nbytes == (nbytes * (group.size - 1) if group.rank == root else 0)
            out, meter = (torch.zeros(33, dtype=wide) if group.rank == root else None), Meter()
            reduce_native(every[group.rank], out, root, group, meter)
            assert meter.wire_nbytes == (0 if group.rank == root else nbytes)
            if out is not None:
                total = every[0].to(wide)
                for values in every[1:]:
                    total = total + values.to(wide)
                assert torch.equal(out, total)


def test_native(on_ranks: RunRanks) -> None:
    on_ranks(3, _native)


def _long_and_several() -> list[str]:
    """Send messages in segments, two at once, waited for in call order."""
    group, digests = Group.of(None), []
    me, numel = group.rank, (1 << 20) + 33
    first, second = values_of(0, numel), values_of(1, numel, seed=1)
    via = [Transfer(Int8(), group, Meter()) for _ in range(3)]
    outs = [torch.zeros(numel) for _ in range(2)]
    handles = [
        broadcast(first if me == 0 else None, outs[0], 0, via[0], async_op=True),
        broadcast(second if me == 1 else None, outs[1], 1, via[1], async_op=True),
    ]
    total: Tensor | None = torch.zeros(numel) if me == 1 else None
    handles.append(reduce(first, total, 1, via[2], async_op=True))
    for handle in handles:
        handle.wait()
    assert me != 0 or via[0].meter.messages > 1
    if total is not None:
        most = bound(Int8(), [first], hops=1) + float(first.abs().max()) * 2.0**-20
        assert float((total - 2 * first).abs().max()) <= most
    digests += [digest(out) for out in outs]
    return digests


def test_long_messages_side_by_side(on_ranks: RunRanks) -> None:
    results = on_ranks(2, _long_and_several)
    assert results[0] == results[1]


def _wrong() -> None:
    group, values = Group.of(None), torch.zeros(8)
    via = Transfer(Int8(), group, Meter())
    with pytest.raises(CodecError, match="only there"):
        broadcast(values if dist.get_rank() else None, torch.zeros(8), 0, via)
    with pytest.raises(CodecError, match="only there"):
        reduce(values, values.clone() if dist.get_rank() else None, 0, via)
    if dist.get_rank() == 0:
        with pytest.raises(CodecError, match="expected 8 elements"):
            broadcast(values, torch.zeros(9), 0, via)
        with pytest.raises(CodecError, match=r"expected 8 elements of torch\.float32"):
            reduce(values, torch.zeros(8, dtype=torch.bfloat16), 0, via)


def test_wrong_tensors_are_refused_before_anything_is_sent(on_ranks: RunRanks) -> None:
    on_ranks(2, _wrong)
