"""Sizes that stay on the device, emulated on a CPU, and every collective that supports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridcomp.codecs import Codec
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual, as_fp32, split
from hybridcomp.collectives import Meter, OwnedRange, chunk_ranges
from hybridcomp.collectives.wire import payload_sizes
from tests.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    recv,
    reduce_scatter,
    reduce_to_owners,
    send,
)
from tests.collectives.common import digest, values_of
from tests.collectives.hierarchical.test_two_levels import levels_of

NUMEL = 9001
#: results of a collective: bits of all outputs, and its meter's figures
Outcome = tuple[str, tuple[object, ...]]


class Late(payload_sizes.SizeReader):
    """Treats the CPU as a device; words reach the host when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.waits = 0

    def stay(self, codec: Codec, device: torch.device) -> bool:
        return not codec.fixed_size

    def copied(self, words: Tensor) -> payload_sizes.Arrival:
        self.copies += 1
        host = torch.full_like(words, -1)

        def arrive() -> None:
            self.waits += 1
            host.copy_(words)

        return payload_sizes.Arrival(host, SimpleNamespace(synchronize=arrive))


class Reads(TorchFunctionMode):
    """Counts reads of tensors that block the host."""

    NAMES = ("tolist", "item", "__int__", "__index__", "__bool__", "__float__", "cpu", "numpy")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._functions = [getattr(Tensor, name) for name in self.NAMES]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self._functions
        return func(*args, **(kwargs or {}))


@contextmanager
def late() -> Iterator[Late]:
    with mock.patch.object(payload_sizes, "SIZES", Late()) as found:
        yield found


@contextmanager
def sizes_ahead() -> Iterator[None]:
    """Send sizes in separate messages, as everywhere except between CPUs on gloo."""
    with mock.patch.object(payload_sizes, "in_front", return_value=False):
        yield


def cuts_of(numel: int) -> list[int]:
    return [cut for cut in (700, 1500, 4000, 4001, 7000) if cut < numel]


class Sums:
    """Reductions of this rank's values, each split so that a rank sends several payloads."""

    def __init__(self, codec: Codec, dtype: torch.dtype, feedback: bool, bits: int = 32) -> None:
        self.codec, self.dtype, self.feedback, self.bits = codec, dtype, feedback, bits
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.kept: dict[str, Residual] = {}

    def residual(self, name: str, numel: int) -> Residual | None:
        """Return the residual of the previous step."""
        if not self.feedback:
            return None
        if name not in self.kept:
            left = values_of(self.rank, numel, seed=len(self.kept)) / 8
            few = self.bits < 32
            self.kept[name] = QuantizedResidual.of(left, self.bits) if few else torch.zeros(numel)
        return self.kept[name]

    def values(self, step: int) -> Tensor:
        found = values_of(self.rank, NUMEL, self.dtype, seed=step)
        found[2048:4096] = 0  # makes payloads much shorter here
        return found

    def all_reduce(self, step: int, meter: Meter) -> list[Tensor]:
        values = self.values(step)
        start, stop = chunk_ranges(NUMEL, self.ranks)[self.rank]
        all_reduce(
            values, self.codec, None, meter=meter, residual=self.residual("all", NUMEL),
            owner_residual=self.residual("own", stop - start), cuts=cuts_of(NUMEL),
        ).wait()  # fmt: skip
        return [values]

    def reduce_scatter(self, step: int, meter: Meter) -> list[Tensor]:
        lengths = [4992, NUMEL - 4992] + [0] * (self.ranks - 2)
        residual = self.residual("scattered", NUMEL)
        total = reduce_scatter(
            list(torch.split(self.values(step), lengths)), self.codec, None, meter=meter,
            residuals=None if residual is None else split(residual, lengths),
            cuts=[cuts_of(length) for length in lengths],
        ).wait()  # fmt: skip
        return [total]

    def _owners(self, ranges: list[OwnedRange], step: int, meter: Meter) -> list[Tensor]:
        start, stop = chunk_ranges(NUMEL, self.ranks)[self.rank]
        name = f"owned {len(ranges)}"
        return reduce_to_owners(
            self.values(step), ranges, self.codec, None, meter=meter,
            residual=self.residual(name, NUMEL), cuts=cuts_of(NUMEL),
            owner_residual=self.residual(f"{name} own", stop - start),
        )  # fmt: skip

    def direct(self, step: int, meter: Meter) -> list[Tensor]:
        edges = [NUMEL * rank // self.ranks for rank in range(self.ranks + 1)]
        ranges = [OwnedRange(*edge, (rank,)) for rank, edge in enumerate(pairwise(edges))]
        return self._owners(ranges, step, meter)

    def balanced(self, step: int, meter: Meter) -> list[Tensor]:
        every = tuple(range(self.ranks))
        ranges = [OwnedRange(0, 8000, every), OwnedRange(8000, 8500, (1,)),
                  OwnedRange(8500, NUMEL, (0, 1))]  # fmt: skip
        return self._owners(ranges, step, meter)

    def nodes(self, step: int, meter: Meter) -> list[Tensor]:
        """Run the reductions in two levels; four ranks."""
        levels, values = levels_of(2), self.values(step)
        for group in (levels.inner, levels.outer, levels.gathered):
            group.plans.clear()  # they depend on where sizes stay, which the tests change
        low, high = chunk_ranges(NUMEL, levels.width)[levels.local]
        start, stop = chunk_ranges(high - low, levels.nodes)[levels.node]
        all_reduce(
            values, self.codec, levels, meter=meter, cuts=cuts_of(high - low),
            residual=self.residual("node", high - low),
            owner_residual=self.residual("node own", stop - start),
        ).wait()  # fmt: skip
        gathered = values.new_empty(4 * NUMEL)
        all_gather(values, gathered, self.codec, levels, meter=meter).wait()
        lengths = [5000, 1, 4000, 0]
        total = reduce_scatter(
            list(torch.split(self.values(step), lengths)), self.codec, levels, meter=meter
        ).wait()
        ranges = [OwnedRange(0, 3000, (0, 3)), OwnedRange(3000, NUMEL, (1,))]
        owned = reduce_to_owners(self.values(step), ranges, self.codec, levels, meter=meter)
        return [values, gathered, total, *owned]


def moved(codec: Codec, dtype: torch.dtype) -> Iterator[tuple[list[Tensor], Meter]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values, meter = values_of(rank, NUMEL, dtype), Meter()
    out = values.new_empty(ranks * NUMEL)
    all_gather(values, out, codec, None, meter=meter).wait()
    yield [out], meter
    splits, meter = [(1 + rank + other) * 500 for other in range(ranks)], Meter()
    swapped = values.new_empty(sum(splits))
    given = values_of(rank, sum(splits), dtype)
    all_to_all(swapped, given, codec, None, meter=meter, in_splits=splits, out_splits=splits).wait()
    yield [swapped], meter
    for numel in (0, 5, NUMEL):
        values, meter = values_of(0, numel, dtype), Meter()
        if rank == 0:
            send(values, 1, codec, None, meter=meter)
        elif rank == 1:
            values.zero_()
            recv(values, 0, codec, None, meter=meter)
        yield [values], meter


def figures(meter: Meter) -> tuple[object, ...]:
    return (meter.messages, meter.wire_nbytes, meter.inter_nbytes, list(meter.used))


def everything(
    codec: Codec, dtype: torch.dtype, feedback: bool, steps: int, bits: int = 32
) -> list[Outcome]:
    found = []
    sums, two_levels = Sums(codec, dtype, feedback, bits), dist.get_world_size() == 4
    for step in range(steps):
        for reduce in (sums.all_reduce, sums.reduce_scatter, sums.direct, sums.balanced):
            meter = Meter()
            found.append((digest(*reduce(step, meter)), figures(meter)))
        if two_levels:
            meter = Meter()
            found.append((digest(*sums.nodes(step, meter)), figures(meter)))
    found += [(digest(*tensors), figures(meter)) for tensors, meter in moved(codec, dtype)]
    return [*found, (digest(*map(as_fp32, sums.kept.values())), ())]
