"""Predicted message memory equals the buffers' size, on CPUs and as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_host as bench
from benchmarks.gpu_bench import group_messages as kinds
from benchmarks.gpu_bench.messages import ME, Messages, group_without_wire
from hybridcomp.channels import Shards
from hybridcomp.channels.accounting.rank_messages import (
    RankMessages,
    Way,
    buffer_nbytes,
    staged_nbytes,
)
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.collectives import Meter
from hybridcomp.collectives.wire import POOL, transport
from tests.collectives.calls import all_reduce
from tests.collectives.common import values_of
from tests.ranks import RunRanks
from tests.stand_ins.counted_staging import CountedStaging
from tests.stand_ins.held import Held

N = 1 << 18
CODEC = make_codec("blockint", bits=4)
WAYS: dict[str, Way] = {
    "all_reduce": "sum", "all_reduce feedback": "sum", "reduce_scatter": "scatter",
    "all_gather": "gather", "all_to_all": "exchange", "all_to_all uneven": "exchange",
    "to all as owners": "own",
}  # fmt: skip


def group(fused: bool, ranks: int) -> AbstractContextManager[None]:
    """Return a group without a wire, with this CPU's kernels or launches as on a GPU."""
    return bench.as_on_a_gpu(ranks) if fused else group_without_wire(ranks)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_buffers_in_one_level(fused: bool, ranks: int) -> None:
    with group(fused, ranks):
        made = Messages(CODEC, torch.randn(N).bfloat16(), ranks)
        runs = {**made.kinds(), **made.buckets()}
        for name, way in WAYS.items():
            sent = RankMessages((N,), way, torch.bfloat16, ranks, on_gpu=fused, copied=False)
            with Held() as held:
                runs[name]()
            told = buffer_nbytes(sent, CODEC)
            assert told == pytest.approx(held.most, rel=0.03), (name, ranks)


@pytest.mark.parametrize("fused", [True, False])
def test_buffers_in_two_levels(fused: bool) -> None:
    ranks = 8
    with group(fused, ranks):
        made = kinds.GroupMessages(CODEC, torch.bfloat16, ranks)
        made.whole = made.stretch = torch.zeros(N, dtype=torch.bfloat16)
        made.shards = Shards(made.whole, N // ranks)
        made.shard = made.shards[ME]
        column = 2 * N // kinds.WIDTH  # a gather between nodes allocates its result
        ways: tuple[tuple[Callable[[], object], Way, int], ...] = (
            (made.deep_all_reduce, "sum", 0), (made.deep_scatter, "scatter", 0),
            (made.deep_gather, "gather", column),
        )  # fmt: skip
        for run, way, others in ways:
            with Held() as held:
                run()
            sent = RankMessages((N,), way, torch.bfloat16, ranks, kinds.WIDTH, fused)
            assert buffer_nbytes(sent, CODEC) == pytest.approx(held.most + others, rel=0.03), way


def _of_a_sum(codec: Codec) -> int:
    """Return the bytes of this rank's buffers in an all-reduce over gloo."""
    values = values_of(dist.get_rank(), N, torch.bfloat16)
    with Held() as held:
        all_reduce(values, codec, None, meter=Meter()).wait()
    return held.most


@pytest.mark.parametrize("name", ["radix", "expcode"])
def test_buffers_of_payloads_that_vary(on_ranks: RunRanks, name: str) -> None:
    """Room for the longest: a lossy codec sends sums in fp32, up to twice the size of bf16."""
    codec = make_codec(name)
    told = buffer_nbytes(RankMessages((N,), "sum", torch.bfloat16, 3, on_gpu=False), codec)
    for most in on_ranks(3, _of_a_sum, codec):
        assert 0.8 * told < most < 1.03 * told  # this rank's payload is shorter


@pytest.mark.parametrize("ranks", [4, 64])
def test_copies_on_the_host(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with group(True, ranks):
        made = Messages(CODEC, torch.randn(N).bfloat16(), ranks)
        runs = {**made.kinds(), **made.buckets()}
        for name, way in WAYS.items():
            staging = CountedStaging()
            monkeypatch.setattr(transport, "STAGING", staging)
            runs[name]()
            sent = RankMessages((N,), way, torch.bfloat16, ranks, staged=True)
            assert staging.most == pytest.approx(staged_nbytes(sent, CODEC), rel=0.03), name
            assert not staged_nbytes(RankMessages((N,), way, torch.bfloat16, ranks), CODEC)


def test_nothing_is_counted_outside() -> None:
    with Held() as held:
        POOL.give(POOL.take(1 << 10, torch.device("cpu")))
    POOL.give(POOL.take(1 << 12, torch.device("cpu")))
    assert held.most == 1 << 10 and held.now == 0
