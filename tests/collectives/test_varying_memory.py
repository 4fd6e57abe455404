"""Predicted buffers of variable-size codecs equal torch's allocations, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.accounting.rank_messages import (
    RankMessages,
    Way,
    buffer_nbytes,
    staged_nbytes,
)
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.quantized_residual import split, zeros
from hybridcomp.codecs.stepcode import MODEL
from hybridcomp.codecs.varying_pieces import WORDS_NBYTES
from hybridcomp.collectives import OwnedRange, all_reduction, chunk_ranges
from hybridcomp.collectives.wire import staging as wire_staging
from hybridcomp.collectives.wire import transport
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.workspaces import Workspaces
from tests.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    recv,
    reduce_scatter,
    reduce_to_owners,
    send,
)
from tests.collectives.late import late
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import EmulatedLauncher
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins.allocated import Allocated
from tests.stand_ins.counted_staging import CountedStaging

CPU = torch.device("cpu")
N = 3 << 14
#: values -> slots as long as payloads can be
WORST: dict[str, Codec] = {
    "expcode": make_codec("expcode"), "mpc": make_codec("mpc"), "stepcode": ExactSteps(),
    "radix": make_codec("radix", error_bound=1e-30, mode="abs"),
    "topk": make_codec("topk", bits=8),
}  # fmt: skip


class Slabs(EmulatedLauncher):
    """Takes words from a slab, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._workspaces = Workspaces(super().zeros)

    def zeros(self, words: int) -> Tensor:
        return self._workspaces.take(words, 0)


def noise(codec: Codec, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return the values with the largest payloads: random bits, or far apart for sparse codecs."""
    generator = torch.Generator().manual_seed(seed)
    if codec.sparse:
        return (torch.arange(numel) % 65 == 64).to(dtype)
    if not codec.lossless:
        return torch.randn(numel, generator=generator).to(dtype)
    words = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator)
    return words.to(torch.uint8).view(dtype)


class Runs:
    """A message of every kind, and the residuals that it keeps."""

    def __init__(self, codec: Codec, dtype: torch.dtype, bits: int) -> None:
        self.codec, self.ranks, self.me = codec, dist.get_world_size(), dist.get_rank()
        self.values, self.out = (noise(codec, N, dtype, seed) for seed in (self.me, self.me + 9))
        self.edges = chunk_ranges(N, self.ranks)
        low, high = self.edges[self.me]
        self.shard, self.left, self.own = self.values[low:high].clone(), None, None
        if bits:
            self.left = zeros(bits, N, CPU)
            self.own = zeros(bits, high - low, CPU) if self.ranks > 2 else None

    def sum(self) -> None:
        kept: dict[str, Any] = {"residual": self.left, "owner_residual": self.own}
        all_reduce(self.out, self.codec, None, **kept).wait()

    def scatter(self) -> None:
        lengths = [high - low for low, high in self.edges]
        left = None if self.left is None else split(self.left, lengths)
        shards = torch.split(self.values, lengths)
        reduce_scatter(shards, self.codec, None, residuals=left).wait()

    def owners(self) -> None:
        ranges = [OwnedRange(*edge, (rank,)) for rank, edge in enumerate(self.edges)]
        reduce_to_owners(self.values, ranges, self.codec, None, residual=self.left)

    def gather(self) -> None:
        codec = self.codec.against(self.out[slice(*self.edges[self.me])])
        all_gather(self.shard, self.out, codec, None).wait()

    def exchange(self) -> None:
        all_to_all(self.out, self.values, self.codec, None).wait()

    def send(self) -> None:
        if self.me == 0:
            send(self.values, 1, self.codec, None)
        elif self.me == 1:
            recv(self.out, 0, self.codec, None)


WAYS: dict[Way, Callable[[Runs], None]] = {
    "sum": Runs.sum, "scatter": Runs.scatter, "own": Runs.owners, "gather": Runs.gather,
    "exchange": Runs.exchange, "send": Runs.send,
}  # fmt: skip
#: codec, dtype, bits of residuals
Case = tuple[str, torch.dtype, int]
BF16, FP32 = torch.bfloat16, torch.float32
CASES: dict[str, list[Case]] = {
    "by day": [
        ("expcode", BF16, 0), ("radix", BF16, 8), ("stepcode", BF16, 0), ("topk", BF16, 0),
    ],
    "all else": [
        ("radix", BF16, 0), ("radix", BF16, 32), ("radix", FP32, 8), ("mpc", BF16, 0),
        ("expcode", FP32, 0), ("mpc", FP32, 0), ("radix", FP32, 0), ("radix", FP32, 32),
    ],
}  # fmt: skip


def _ways(name: str, bits: int) -> tuple[Way, ...]:
    """Return the messages that support such a codec and residuals."""
    if name in ("stepcode", "topk"):
        return ("gather",)
    return ("sum", "scatter", "own") if bits else tuple(WAYS)


def _settle(residual: Tensor, delivered: Tensor) -> None:
    """Subtract 16-bit values without conversion, as a GPU does."""
    residual.sub_(delivered).nan_to_num_(0.0, 0.0, 0.0)


@contextmanager
def on_a_gpu() -> Iterator[int]:
    """Launch kernels as on a GPU with sizes there; yields the bytes of the slab of words."""
    launcher = Slabs()
    with (
        late(),
        kernels_replaced(CudaKernels(launcher)),
        mock.patch.object(all_reduction, "settle", _settle),
    ):
        yield launcher.zeros(0).untyped_storage().nbytes()


def _held(cases: Sequence[Case], on_gpu: bool) -> list[dict[Way, int]]:
    """Return by case torch's peak allocation for a message of each kind on this rank."""
    found = list[dict[Way, int]]()
    with on_a_gpu() if on_gpu else nullcontext(0) as slab:
        for name, dtype, bits in cases:
            runs, row = Runs(WORST[name], dtype, bits), dict[Way, int]()
            for way in _ways(name, bits):
                with Allocated() as allocated:
                    WAYS[way](runs)
                results = FP32.itemsize * N // runs.ranks if way == "scatter" else 0
                row[way] = slab + allocated.most - results
            found.append(row)
    return found


@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize("cases", by_day(CASES, ["by day"]))
@pytest.mark.parametrize("ranks", by_day([2, 3], [3]))
def test_buffers_are_told_as_they_are_allocated(
    on_ranks: RunRanks, ranks: int, cases: str, on_gpu: bool
) -> None:
    """For values with the largest payloads; a delta payload has up to 5 kB for its model."""
    rows = on_ranks(ranks, _held, CASES[cases], on_gpu)
    words = WORDS_NBYTES if on_gpu else 0
    for (name, dtype, bits), *held in zip(CASES[cases], *rows, strict=True):
        for way in _ways(name, bits):
            most = max(one[way] for one in held) - words
            sent = RankMessages((N,), way, dtype, ranks, on_gpu=on_gpu, copied=False)
            told = buffer_nbytes(sent, WORST[name], residual_bits=bits) - words
            models = MODEL * (ranks + 1) if name == "stepcode" else 0
            assert told == pytest.approx(most, rel=0.03, abs=models), (name, dtype, bits, way)


def _staged(cases: Sequence[Case]) -> list[dict[Way, int]]:
    """Return by case the peak bytes of host copies for a message of each kind on this rank."""
    found = list[dict[Way, int]]()
    with on_a_gpu():
        for name, dtype, bits in cases:
            runs, row = Runs(WORST[name], dtype, bits), dict[Way, int]()
            for way in _ways(name, bits):
                staging = CountedStaging()
                with (
                    mock.patch.object(transport, "STAGING", staging),
                    mock.patch.object(wire_staging, "STAGING", staging),
                ):
                    WAYS[way](runs)
                row[way] = staging.most
            found.append(row)
    return found


def test_copies_on_the_host(on_ranks: RunRanks) -> None:
    """Sums of lossy codecs, and all messages with residuals, travel in fp32."""
    cases: list[Case] = [("expcode", BF16, 0), ("radix", BF16, 32)]
    for (name, dtype, bits), *held in zip(cases, *on_ranks(3, _staged, cases), strict=True):
        for way in _ways(name, bits):
            most = max(one[way] for one in held)
            told = staged_nbytes(RankMessages((N,), way, dtype, 3, staged=True), WORST[name], bits)
            assert told == pytest.approx(most, rel=0.03), (name, dtype, bits, way)
