"""Asynchronous calls: scope of wait(), several in flight, buffers, failures."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Work

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Meter
from hybridcomp.collectives.wire.encoding import Pool
from hybridcomp.collectives.wire.handle import Pending
from hybridcomp.collectives.wire.transport import MOST_FORGOTTEN
from tests.collectives.calls import all_gather, all_reduce, all_to_all, reduce_scatter
from tests.collectives.common import CODECS, DAY, LOSSLESS, LOSSY, digest, values_of
from tests.ranks import RunRanks
from tests.selection import by_day


def _one_of_each(codec: Codec, seed: int, async_op: bool) -> list[str]:
    """Post all four kinds, then wait in another order."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    done: list[str] = []
    reduced = values_of(me, 5000, seed=seed)
    values = values_of(me, 640 * ranks, torch.bfloat16, seed=seed)
    gathered, swapped = torch.zeros(777 * ranks), torch.zeros_like(values)
    meters = [Meter() for _ in range(4)]
    first = all_reduce(reduced, codec, None, meter=meters[0], async_op=async_op)
    shards = torch.split(values_of(me, 900 * ranks, seed=seed), 900)
    second = reduce_scatter(shards, codec, None, meter=meters[1], async_op=async_op)
    shard = values_of(me, 777, seed=seed)
    third = all_gather(shard, gathered, codec, None, meter=meters[2], async_op=async_op)
    shard.zero_()  # it was read before the call returned
    fourth = all_to_all(swapped, values, codec, None, meter=meters[3], async_op=async_op)
    handles: tuple[Pending[Any], ...] = (first, second, third, fourth)
    assert all(handle.is_completed() != async_op for handle in handles)
    for index, handle in enumerate(handles):
        assert handle.then(partial(done.append, str(index))) is handle
    assert len(done) == (0 if async_op else 4)
    for handle in (third, first, fourth, second, first):
        handle.wait()
        assert handle.is_completed()
    assert done == (["2", "0", "3", "1"] if async_op else ["0", "1", "2", "3"])
    total = second.wait()
    assert second.wait() is total and all(meter.messages for meter in meters)
    return [digest(t) for t in (reduced, total, gathered, swapped)]


def _asynchronous(codec: Codec) -> None:
    for seed in range(3):
        assert _one_of_each(codec, seed, True) == _one_of_each(codec, seed, False)


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_asynchronous_equals_blocking(on_ranks: RunRanks, codec: Codec) -> None:
    on_ranks(3, _asynchronous, codec)


def _many_in_flight(codec: Codec) -> list[str]:
    me = dist.get_rank()
    numels = [4000, 64, 1, 9999, 500, 64, 0, 3000]
    tensors = [values_of(me, numel, seed=index) for index, numel in enumerate(numels)]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        all_reduce(tensor, codec, None)
    handles = [all_reduce(t, codec, None, async_op=True) for t in tensors]
    for handle in handles[::-1]:
        handle.wait()
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    return [digest(tensor) for tensor in tensors]


def test_many_in_flight(on_ranks: RunRanks) -> None:
    for codec in DAY:
        results = on_ranks(3, _many_in_flight, codec)
        assert results[0] == results[1] == results[2]


def _forgotten(codec: Codec) -> None:
    """A dropped handle must not lend its buffers to the next call."""
    me = dist.get_rank()
    for seed in range(MOST_FORGOTTEN + 3):
        out = torch.zeros(2000)
        all_gather(values_of(me, 1000, seed=9), out, codec, None, async_op=True)
        tensor = values_of(me, 1000, seed=seed)
        expected = values_of(0, 1000, seed=seed) + values_of(1, 1000, seed=seed)
        all_reduce(tensor, codec, None)
        assert torch.equal(tensor, expected)


def test_a_forgotten_handle_harms_nobody(on_ranks: RunRanks) -> None:
    on_ranks(2, _forgotten, LOSSLESS[0])


def _requires_grad(codec: Codec) -> None:
    me = dist.get_rank()
    leaf = values_of(me, 100).requires_grad_()
    expected = leaf.detach().clone()
    all_reduce(expected, codec, None)
    all_reduce(leaf, codec, None)
    assert torch.equal(leaf, expected) and leaf.grad_fn is None


def test_tensors_that_require_grad(on_ranks: RunRanks) -> None:
    on_ranks(2, _requires_grad, LOSSY[0])


@pytest.mark.parametrize("by", ["steps", "callback"])
def test_a_failure_is_raised_again_on_every_wait(by: str) -> None:
    """A callback may wait for a message, too: that of the parameters that are summed exactly."""

    def fail() -> None:
        raise ValueError("broken payload")

    def steps() -> Generator[Work, None, None]:
        yield dist.Work()
        if by == "steps":
            fail()

    class Ready(Pending[None]):
        def __init__(self) -> None:
            super().__init__(steps(), Meter(), async_op=True)
            self._work = Arrived()

    class Arrived(Work):
        def wait(self, timeout: object = None) -> bool:
            return True

    handle, called = Ready(), []
    if by == "callback":
        handle.then(fail)
    handle.then(lambda: called.append(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken payload"):
            handle.wait()
    assert not handle.is_completed() and not called


def test_pool_lends_a_buffer_to_one_call_at_a_time() -> None:
    pool, cpu = Pool(), torch.device("cpu")
    first, second = pool.take(100, cpu), pool.take(100, cpu)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first, None, second)
    small = pool.take(50, cpu)
    assert small.data_ptr() in (first.data_ptr(), second.data_ptr())
    large = pool.take(1000, cpu)  # replaces the one that was too small
    assert large.numel() >= 1000
    pool.give(small, large)
    again, other = pool.take(1000, cpu), pool.take(10, cpu)
    assert again.data_ptr() == large.data_ptr() and other.data_ptr() == small.data_ptr()
    buffer, view = pool.take_fp32(3, cpu)
    assert view.dtype == torch.float32 and view.numel() == 3
    assert buffer.data_ptr() == view.data_ptr()
    pool.give(again, other, buffer)
    pool.clear()
    assert pool.take(8, cpu).numel() == 8
