"""Passes of attention in turns: all methods and codecs, over links without limit and at rates."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.context_bench import methods, report
from bench.context_bench.links import Links
from bench.context_bench.steady import SteadyBlocks
from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.session import process

#: passes over links without limit that the rate of the links is taken from
LOOKS = 3
#: passes of each method that steady blocks are timed in
TIMED = 6
#: a rate that stands for links without limit
FREE = 0


@dataclass
class Way:
    """A method with a codec, and what its passes took."""

    method: str
    codec: str
    channels: Channels
    run: methods.Passes
    #: by rate: seconds of the slowest rank, of the forward pass and of both
    seconds: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    nbytes: tuple[int, int] = (0, 0)  # of the rank that sends most, forward and backward pass
    error: float | None = None

    def once(self) -> tuple[float, float]:
        """One pass of both; seconds of the slowest rank."""
        process.use(self.channels)
        self.channels.ledger.restart()
        dist.barrier()
        start = time.perf_counter()
        self.run.forward()
        middle = time.perf_counter()
        self.run.backward()
        stop = time.perf_counter()
        found = torch.tensor([middle - start, stop - start])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found[0]), float(found[1])

    def look(self, exact: list[Tensor] | None) -> list[Tensor]:
        """Bytes of each pass and the error; returns what was computed."""
        process.use(self.channels)
        self.channels.ledger.restart()
        self.run.forward()
        forward = methods.sent(self.channels)
        found = self.run.backward()
        sent = torch.tensor([forward, methods.sent(self.channels) - forward])
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        self.nbytes = int(sent[0]), int(sent[1])
        self.error = methods.distance(found, exact)
        return found


def rows_of(
    length: int,
    codecs: Mapping[str, Any],
    args: argparse.Namespace,
    links: Links,
    steady: SteadyBlocks | None,
) -> list[dict[str, Any]]:
    """The rows of one length. Collective; rank 0 has the links changed."""
    size = methods.Size(length, args.heads, args.kept, args.width)
    tensors = methods.draw(size, getattr(torch, args.dtype))
    ways = [
        Way(method, name, channels, methods.prepare(method, tensors, size, channels))
        for method in args.methods
        for name, setting in codecs.items()
        for channels in [_channels(setting)]
    ]
    _shape(links, FREE)
    if steady is not None:
        _settle(steady, [way for way in ways if way.codec == ways[0].codec])
    exact: dict[str, list[Tensor]] = {}
    for way in ways:
        found = way.look(exact.get(way.method))
        exact.setdefault(way.method, found)
    rates = [FREE, *(_rate(ways[0], ratio) for ratio in args.ratio)]
    for turn in range(args.rounds):
        for rate in rates:
            _shape(links, rate)
            for way in ways[:: 1 if turn % 2 == 0 else -1]:
                way.seconds.setdefault(rate, []).append(way.once())
    process.use(None)
    late = 0.0 if steady is None else steady.late_share()
    return [
        {
            "length": length, "method": way.method, "codec": way.codec, "ratio": ratio,
            "rate": rate, "nbytes": way.nbytes, "error": way.error,
            "late": late,
            "free": way.seconds[FREE], "seconds": way.seconds[rate],
        }
        for ratio, rate in zip(args.ratio, rates[1:], strict=True)
        for way in ways
    ]  # fmt: skip


def _settle(steady: SteadyBlocks, ways: Sequence[Way]) -> None:
    """Time the blocks of some ways, so that they last as long from now on."""
    steady.learn()
    for _ in range(TIMED):
        for way in ways:
            way.once()
    steady.settle()


def _channels(setting: Any) -> Channels:
    ledger = {"every": 1_000_000, "sample_every": 0}
    return Channels(CompressionConfig.parse({"cp": setting, "min_bytes": 0, "ledger": ledger}))


def _rate(native: Way, ratio: float) -> int:
    """Bits a second at which the bytes of the native ring need ``ratio`` times its computing."""
    seconds = statistics.median(native.once()[1] for _ in range(LOOKS))
    bits = 8 * report.FRAMES * sum(native.nbytes)
    rate = torch.tensor([bits / (ratio * seconds)], dtype=torch.float64)
    dist.broadcast(rate, 0)
    return max(8000, int(rate))


def _shape(links: Links, rate: int) -> None:
    dist.barrier()  # what is on its way has arrived
    if dist.get_rank() == 0:
        links.shape(None if rate == FREE else rate)
    dist.barrier()
