"""Measure the times of slices and messages of a stage.

Slices of several lengths and starts run forward and backward, and messages are sent to the
neighbours; fits through these times (``times``) predict those of all other slices.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from hybridcomp.codecs import Codec
from hybridcomp.config.policy import Traffic
from hybridcomp.dimensions import DIRECTIONS, Direction
from hybridcomp.job import small_messages
from hybridcomp.job.together import ending
from hybridcomp.nn.slices.kv_cache import KVCache
from hybridcomp.nn.slices.pipeline import SlicePipeline, StageLayers
from hybridcomp.nn.slices.stage import OnLeaves, SlicedStage, leaves_of
from hybridcomp.nn.slices.times import FittedTimes, Line, SliceTimes, fitted, of_computing

#: most granules of a sequence; the dynamic program is quadratic in them
GRANULES = 64


def granule_of(length: int, most: int = GRANULES) -> int:
    """Return the fewest tokens that cut ``length`` into at most ``most`` equal granules."""
    return next(
        size for size in range(1, length + 1) if not length % size and length // size <= most
    )


def slice_times(
    stage: SlicedStage,
    length: int,
    batch: int = 1,
    *,
    granule: int | None = None,
    repeats: int = 3,
    agree: ProcessGroup | None = None,
) -> SliceTimes:
    """Measure the times of slices on this stage, and gather the times of all other stages.

    Every rank of ``agree`` calls it, and gets the same times. Gradients, the random state and
    buffers stay unchanged.

    Args:
        stage: the stage of this rank.
        length: tokens of a sequence.
        batch: sequences of a micro-batch.
        granule: tokens of which slices are multiples, a divisor of ``length``; None: the smallest
            that gives at most 64 granules.
        repeats: how often each slice is timed; the median counts.
        agree: ranks that must choose the same slices; None: all ranks of the job.
    """
    size, pipeline = granule or granule_of(length), stage.pipeline
    with ending("timing token slices"):
        with undisturbed(pipeline):
            lines = _Timer(pipeline, length, batch, repeats).lines(size)
            own = FittedTimes(*lines, *_messages(pipeline, length, size, batch, repeats))
        every = small_messages.gather_objects(own, agree)
    return SliceTimes(every, pipeline.count, size, length // size)


def now(device: torch.device) -> float:
    """Return the time in seconds, once ``device`` has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def undisturbed(pipeline: SlicePipeline) -> Iterator[None]:
    """Restore the random state and the stage's buffers after the body has run its layers."""
    module, devices = pipeline.stage, []
    assert isinstance(module, nn.Module)
    if pipeline.device.type == "cuda":
        devices = [pipeline.device]
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for buffer, values in kept:
            buffer.copy_(values)


class _Timer:
    """Time slices of a stage as in a step: with keys and values of earlier slices, and gradients
    from later ones."""

    def __init__(self, pipeline: SlicePipeline, length: int, batch: int, repeats: int) -> None:
        self._pipeline, self._batch, self._repeats = pipeline, batch, repeats
        self._length, self._past = length, KVCache(length)
        shape, device = (batch, length), pipeline.device
        self._labels = self._values = torch.zeros(shape, dtype=torch.int64, device=device)
        if not pipeline.is_first:
            whole = (*shape, pipeline.width)
            self._values = torch.zeros(whole, dtype=pipeline.dtype, device=device)
        module = pipeline.stage
        assert isinstance(module, nn.Module)
        # new leaves: the stage's gradients stay unchanged, and no hook of an engine runs
        self._run: StageLayers = OnLeaves(module, leaves_of(module.parameters()))

    def lines(self, granule: int) -> tuple[Line, Line]:
        """Fit the times of slices that begin the sequence, and of later ones."""
        count = self._length // granule
        self._fill(granule * max(1, count // 4))
        sizes = sorted({max(1, count // part) for part in (count, 32, 16, 8, 4, 2)})
        later = [
            (start, start + size)
            for size in sizes
            for start in sorted({size, (count - size) // 2, count - size})
            if 0 < start <= count - size
        ]
        first = [(0, size) for size in (*sizes, count)]
        fits = []
        for slices in (later, first):
            edges = [(granule * start, granule * stop) for start, stop in slices]
            seconds = [self._median(start, stop) for start, stop in edges]
            fits.append(_line(edges, seconds))
        return fits[1], fits[0]

    def _fill(self, tokens: int) -> None:
        """Store the keys and values of the whole sequence, slice by slice."""
        with torch.no_grad():
            for start in range(0, self._length, tokens):
                self._run(self._values[:, start : start + tokens], self._past.at(start))

    def _median(self, start: int, stop: int) -> float:
        self._once(start, stop)  # first run, which allocates
        return statistics.median(self._once(start, stop) for _ in range(self._repeats))

    def _once(self, start: int, stop: int) -> float:
        """Return the seconds of one slice: forward, backward, and coding of its messages."""
        pipeline = self._pipeline
        own = self._values[:, start:stop].detach()
        if own.is_floating_point():
            own.requires_grad_()
        coders = [_coder(pipeline, self._batch * (stop - start), way) for way in DIRECTIONS]
        begin = now(pipeline.device)
        out = self._run(own, self._past.at(start))
        if pipeline.is_last:
            out = pipeline.loss(out, self._labels[:, start:stop])
        if out.requires_grad:  # false on a first stage with only frozen parameters
            out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        for coder in coders:
            coder()
        return now(pipeline.device) - begin


def _line(edges: list[tuple[int, int]], seconds: list[float]) -> Line:
    """Fit the times of the slices ``edges``; without any (one granule only) return zeros."""
    return fitted([of_computing(*each) for each in edges], seconds) if edges else [0.0] * 5


def _codec(pipeline: SlicePipeline, numel: int, way: Direction) -> Codec | None:
    """Return the codec for ``numel`` values after the block's start step; None: native."""
    channels = pipeline.channels()
    if channels is None:
        return None
    step = max(channels.step, channels.policy.start_step)
    return channels.policy.choose(Traffic("pp", way, pipeline.dtype, numel, 2, step))


def _coder(pipeline: SlicePipeline, tokens: int, way: Direction) -> Callable[[], None]:
    """Return a function that encodes and decodes this stage's messages of one slice, one way."""
    numel = tokens * pipeline.width
    codec = _codec(pipeline, numel, way)
    ends = (not pipeline.is_first) + (not pipeline.is_last)
    values = torch.randn(numel, device=pipeline.device, dtype=torch.float32).to(pipeline.dtype)

    def run() -> None:
        """Encode the sent and decode the received message; outer stages have only one of them."""
        if codec is None:
            return
        payload = torch.empty(
            codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8, device=values.device
        )
        if ends == 2 or (way == "forward") is pipeline.is_first:
            codec.encode(values, payload)
        if ends == 2 or (way == "forward") is pipeline.is_last:
            codec.encode(values, payload)
            codec.decode(payload, values)

    return run


def _messages(
    pipeline: SlicePipeline, length: int, granule: int, batch: int, repeats: int
) -> tuple[Line, Line]:
    """Fit the times until a slice's messages in both directions are posted, and have arrived."""
    if pipeline.count == 1:
        return [0.0, 0.0], [0.0, 0.0]
    few, many = granule, max(granule + 1, length)
    took = []
    for tokens in (few, few, many):  # the first, which waits for neighbours, is left out
        taken = [_both_ways(pipeline, batch * tokens * pipeline.width) for _ in range(repeats)]
        took.append([statistics.median(column) for column in zip(*taken, strict=True)])
    _, low, high = took
    post, arrive = (
        _through((few, less), (many, more)) for less, more in zip(low, high, strict=True)
    )
    return post, arrive


def _through(low: tuple[int, float], high: tuple[int, float]) -> Line:
    """Fit a line to two ``(tokens, seconds)``: seconds per call and per 1,000 tokens, both >= 0."""
    slope = max(0.0, high[1] - low[1]) / (high[0] - low[0])
    return [max(0.0, low[1] - slope * low[0]), 1e3 * slope]


def _both_ways(pipeline: SlicePipeline, numel: int) -> tuple[float, float]:
    """Time a message of ``numel`` values in each direction: total seconds posting, and arriving."""
    ways = [_exchange(pipeline, numel, way) for way in DIRECTIONS]
    return sum(posting for posting, _ in ways), sum(whole for _, whole in ways)


def _exchange(pipeline: SlicePipeline, numel: int, way: Direction) -> tuple[float, float]:
    """Time messages of the codec's size from each stage to the next one in direction ``way``."""
    codec = _codec(pipeline, numel, way)
    nbytes = numel * pipeline.dtype.itemsize
    if codec is not None:
        nbytes = round(numel * codec.bits_per_value(pipeline.dtype) / 8)
    first, last = (pipeline.is_first, pipeline.is_last)[:: 1 if way == "forward" else -1]
    works: list[Any] = []
    values = torch.zeros(2, nbytes, dtype=torch.uint8, device=pipeline.device)
    begin = now(pipeline.device)
    if not first:
        works.append(dist.irecv(values[1], pipeline.neighbour(False, way), group=pipeline.group))
    if not last:
        works.append(dist.isend(values[0], pipeline.neighbour(True, way), group=pipeline.group))
    posted = time.perf_counter()  # ``now`` would wait for the messages on a GPU
    for work in works:
        work.wait()
    return posted - begin, now(pipeline.device) - begin
