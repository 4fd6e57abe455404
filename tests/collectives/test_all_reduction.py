"""all_reduce and reduce_scatter: sums, bounds, replicas, bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Meter, chunk_ranges
from hybridcomp.errors import CodecError
from tests.collectives.calls import all_reduce, reduce_scatter
from tests.collectives.common import (
    CODECS,
    DAY,
    DTYPES,
    LOSSY,
    all_reduce_wire,
    bound,
    digest,
    rank_order_sum,
    values_of,
)
from tests.ranks import RunRanks
from tests.selection import by_day

#: fewer elements than ranks, fewer than a block, empty last chunks, no multiple of 32, even
NUMELS = (0, 1, 3, 33, 100, 1000, 4096)


def _all_reduce(codec: Codec) -> list[str]:
    """Reduce all dtypes and lengths; return the results' digests."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    digests = []
    for dtype in DTYPES:
        for numel in NUMELS:
            inputs = [values_of(rank, numel, dtype) for rank in range(ranks)]
            tensor, meter = inputs[me].clone(), Meter()
            all_reduce(tensor, codec, None, meter=meter)
            exact = rank_order_sum(inputs)
            if codec.lossless:
                assert torch.equal(tensor, exact.to(dtype)), (dtype, numel)
            elif numel:
                error = float((tensor.float() - exact).abs().max())
                assert error <= bound(codec, inputs, hops=2), (dtype, numel)
            if codec.fixed_size:
                assert meter.wire_nbytes == all_reduce_wire(codec, numel, dtype, me, ranks)
            digests.append(digest(tensor))
    return digests


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_reduce(on_ranks: RunRanks, ranks: int, codec: Codec) -> None:
    results = on_ranks(ranks, _all_reduce, codec)
    assert len(results[0]) == len(DTYPES) * len(NUMELS)
    assert all(result == results[0] for result in results)


def _world_size_one(codec: Codec) -> None:
    tensor, residual, meter = values_of(0, 100), torch.ones(100), Meter()
    handle = all_reduce(tensor, codec, None, meter=meter, residual=residual, async_op=True)
    handle.wait()
    assert torch.equal(tensor, values_of(0, 100) + 1) and not residual.any(), "from more ranks"
    total = reduce_scatter([tensor], codec, None, meter=meter, residuals=[residual.fill_(2)]).wait()
    assert torch.equal(total, tensor + 2) and not residual.any()
    assert meter == Meter(wait_s=meter.wait_s)


def test_one_rank_sends_nothing_and_is_exact(on_ranks: RunRanks) -> None:
    on_ranks(1, _world_size_one, LOSSY[0])


def _reduce_scatter(codec: Codec, lengths: list[int], dtype: torch.dtype) -> None:
    me, ranks = dist.get_rank(), dist.get_world_size()
    inputs = [values_of(rank, sum(lengths), dtype) for rank in range(ranks)]
    own = inputs[me].clone()
    shards = list(torch.split(own, lengths))
    meter = Meter()
    total = reduce_scatter(shards, codec, None, meter=meter).wait()
    assert torch.equal(own, inputs[me]), "the shards belong to the caller"
    assert total.dtype == torch.float32 and total.numel() == lengths[me]
    parts = [torch.split(values, lengths)[me] for values in inputs]
    exact = rank_order_sum(parts)
    if codec.lossless:
        assert torch.equal(total, exact)
    elif total.numel():
        others = [part for rank, part in enumerate(parts) if rank != me]
        error = float((total - exact).abs().max())
        peak = float(exact.abs().max())
        assert error <= bound(codec, others, hops=1) + peak * 2.0**-20
    if codec.fixed_size:
        sent = [codec.wire_nbytes(n, dtype) for rank, n in enumerate(lengths) if rank != me]
        assert meter.wire_nbytes == sum(sent)


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("lengths", [[64, 64], [100, 0, 7], [0, 0, 0], [5, 0, 333, 64, 1]], ids=str)
def test_reduce_scatter(on_ranks: RunRanks, lengths: list[int], codec: Codec) -> None:
    for dtype in DTYPES:
        on_ranks(len(lengths), _reduce_scatter, codec, lengths, dtype)


def _subgroup(codec: Codec) -> str | None:
    group = dist.new_group([1, 2])
    me = dist.get_rank()
    if me == 0:
        return None
    inputs = [values_of(rank, 500) for rank in (1, 2)]
    tensor = inputs[me - 1].clone()
    all_reduce(tensor, codec, group)
    error = float((tensor - rank_order_sum(inputs)).abs().max())
    assert error <= bound(codec, inputs, hops=2)
    shards = list(torch.split(inputs[me - 1], [400, 100]))
    total = reduce_scatter(shards, codec, group).wait()
    assert total.numel() == [400, 100][me - 1]
    return digest(tensor)


def test_subgroup(on_ranks: RunRanks) -> None:
    for codec in DAY:
        outside, first, second = on_ranks(3, _subgroup, codec)
        assert outside is None and first == second is not None


def _wrong_tensors() -> None:
    codec, ranks = CODECS[0], dist.get_world_size()
    flat = torch.zeros(64)
    for tensor in (flat.view(8, 8), flat[::2], flat.double(), flat.int()):
        with pytest.raises(CodecError, match="1-D contiguous"):
            all_reduce(tensor, codec, None)
    with pytest.raises(CodecError, match=r"residual: expected 64 .* found 32"):
        all_reduce(flat, codec, None, residual=flat[:32])
    with pytest.raises(CodecError, match="owner_residual: expected 32"):
        all_reduce(flat, codec, None, owner_residual=flat)
    with pytest.raises(CodecError, match=f"expected {ranks} shards of one dtype"):
        reduce_scatter([flat, flat.half()], codec, None)
    with pytest.raises(CodecError, match=f"expected {ranks} shards of one dtype"):
        reduce_scatter([flat], codec, None)
    with pytest.raises(CodecError, match="residuals: expected 2 tensors, found 1"):
        reduce_scatter([flat, flat], codec, None, residuals=[flat])


def test_wrong_tensors_are_refused(on_ranks: RunRanks) -> None:
    on_ranks(2, _wrong_tensors)


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_chunks_cover_in_order(numel: int, ranks: int) -> None:
    chunks = chunk_ranges(numel, ranks)
    assert len(chunks) == ranks and chunks[0][0] == 0 and chunks[-1][1] == numel
    assert all(a[1] == b[0] for a, b in zip(chunks, chunks[1:], strict=False))
    assert all(start % 32 == 0 or start == numel for start, _ in chunks)
    lengths = [stop - start for start, stop in chunks]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] < numel / ranks + 32
