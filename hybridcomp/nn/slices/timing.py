"""What slices take on this machine, for the dynamic program that chooses them.

A stage is timed on slices of several lengths at several places, forward and backward, and what it
sends to its neighbour; lines through these times say what every other slice takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridcomp.codecs import Codec
from hybridcomp.nn.slices.past import Past
from hybridcomp.nn.slices.pipeline import SlicePipeline, Stage
from hybridcomp.nn.slices.stage import OnLeaves, SlicedStage, leaves_of
from hybridcomp.plan.algorithms.slices import Slices, SliceSeconds, token_slices
from hybridcomp.policy import DIRECTIONS, Direction, Traffic

#: granules of a sequence, at most: the dynamic program takes the square of their number
GRANULES = 64
#: of a line: seconds of a slice, of a thousand tokens, of a million pairs of tokens, and of the
#: link for a message and for a thousand tokens of it
Line = Sequence[float]


def granule_of(length: int, most: int = GRANULES) -> int:
    """Tokens of a granule: the fewest that cut ``length`` into at most ``most`` equal granules."""
    return next(
        size for size in range(1, length + 1) if not length % size and length // size <= most
    )


def chosen_slices(
    stage: SlicedStage,
    length: int,
    batch: int = 1,
    *,
    granule: int | None = None,
    repeats: int = 3,
    agree: ProcessGroup | None = None,
) -> tuple[Slices, int]:
    """The slices with which one pass is fastest, by the times of this moment; and their granule.

    Every rank of ``agree`` calls it (None: of the whole job); all get the same answer, made for
    the slowest stage. Gradients and the random state stay what they are.

    Args:
        stage: this rank's.
        length: tokens of a sequence.
        batch: sequences of a micro-batch.
        granule: slices are multiples of so many tokens, a divisor of ``length``; None: at most 64
            granules.
        repeats: how often each slice is timed; the median counts.
        agree: ranks that slice alike.
    """
    size = granule or granule_of(length)
    pipeline = stage.pipeline
    own = [*_compute_line(pipeline, length, size, batch, repeats), *_link(pipeline, length, batch)]
    lines: list[Any] = [None] * dist.get_world_size(agree)
    dist.all_gather_object(lines, own, group=agree)
    return token_slices(length // size, pipeline.count, seconds_of(lines, size)), size


def seconds_of(lines: Sequence[Line], granule: int) -> SliceSeconds:
    """Seconds of a slice, in granules, on the slowest of the stages with these ``lines``.

    A message travels while its stage works on the next slice, so the longer of both counts.
    """

    def seconds(start: int, stop: int) -> float:
        first, last = granule * start, granule * stop
        return max(1e-9, *(max(_busy(line, first, last), _wire(line, last - first))
                           for line in lines))  # fmt: skip

    return seconds


def _features(start: int, stop: int) -> list[float]:
    """Of a slice: one, its tokens, and the pairs of its tokens with those they look at."""
    tokens = stop - start
    return [1.0, tokens / 1e3, tokens * (start + stop) / 2e6]


def _busy(line: Line, start: int, stop: int) -> float:
    return sum(a * b for a, b in zip(line[:3], _features(start, stop), strict=True))


def _wire(line: Line, tokens: int) -> float:
    return line[3] + line[4] * tokens / 1e3


def _compute_line(
    pipeline: SlicePipeline, length: int, granule: int, batch: int, repeats: int
) -> list[float]:
    """A line through the seconds of some slices, none of its parts below zero."""
    count = length // granule
    sizes = sorted({1, max(1, count // 4), max(1, count // 2), count})
    rows, times = [], []
    for size in sizes:
        for start in sorted({0, (count - size) // 2, count - size}):
            edges = granule * start, granule * (start + size)
            _once(pipeline, length, batch, *edges)  # allocates
            found = [_once(pipeline, length, batch, *edges) for _ in range(repeats)]
            rows.append(_features(*edges))
            times.append(statistics.median(found))
    return nonnegative(torch.tensor(rows), torch.tensor(times))


def nonnegative(rows: Tensor, times: Tensor) -> list[float]:
    """The least squares of ``times`` (N) by ``rows`` (N, K), with no weight below zero.

    Of the few columns every subset is tried, which is exact.
    """
    columns = rows.shape[1]
    best, least = [0.0] * columns, float("inf")
    for subset in range(1, 2**columns):
        used = [column for column in range(columns) if subset >> column & 1]
        part = rows[:, used]
        found = torch.linalg.lstsq(part, times.unsqueeze(1), driver="gelsd").solution
        error = float((part @ found - times.unsqueeze(1)).square().sum())
        if bool((found >= 0).all()) and error < least:
            least, best = error, [0.0] * columns
            for column, weight in zip(used, found.squeeze(1).tolist(), strict=True):
                best[column] = weight
    return best


def _once(pipeline: SlicePipeline, length: int, batch: int, start: int, stop: int) -> float:
    """Seconds of one slice on this stage: forward, backward, and coding what it exchanges."""
    device, shape = pipeline.device, (batch, length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    values = tokens
    if not pipeline.is_first:
        values = torch.zeros((*shape, pipeline.width), dtype=pipeline.dtype, device=device)
    run, past = _on_leaves(pipeline), Past()
    if start:
        with torch.no_grad():
            run(values[:, :start], past)
        past.advance(start)
    own = values[:, start:stop].detach()
    if own.is_floating_point():
        own.requires_grad_()
    coders = [_coder(pipeline, batch * (stop - start), way) for way in DIRECTIONS]
    begin = _now(device)
    out = run(own, past)
    if pipeline.is_last:
        out = pipeline.loss(out, tokens[:, start:stop])
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    for coder in coders:
        coder()
    return _now(device) - begin


def _on_leaves(pipeline: SlicePipeline) -> Stage:
    """The stage on leaves of its own, so that neither its gradients nor an engine's hooks know."""
    module = pipeline.stage
    assert isinstance(module, nn.Module)
    return OnLeaves(module, leaves_of(module.parameters()))


def _codec(pipeline: SlicePipeline, numel: int, way: Direction) -> Codec | None:
    """The codec that such a message has once the block's first step has come."""
    channels = pipeline.channels()
    if channels is None:
        return None
    step = max(channels.step, channels.policy.start_step)
    return channels.policy.choose(Traffic("pp", way, pipeline.dtype, numel, 2, step))


def _coder(pipeline: SlicePipeline, tokens: int, way: Direction) -> Callable[[], None]:
    """Encodes and decodes as many messages as this stage does for one slice, one way."""
    numel = tokens * pipeline.width
    codec = _codec(pipeline, numel, way)
    ends = (not pipeline.is_first) + (not pipeline.is_last)
    values = torch.randn(numel, device=pipeline.device).to(pipeline.dtype)

    def run() -> None:
        """A middle stage encodes one and decodes one, an outer one does one of both."""
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


def _link(pipeline: SlicePipeline, length: int, batch: int, repeats: int = 3) -> list[float]:
    """Seconds of the link for a slice: of its messages both ways, and of a thousand tokens."""
    if pipeline.count == 1:
        return [0.0, 0.0]
    few, many = max(1, length // 8), length
    seconds = []
    for tokens in (few, few, many):  # the first one waits for neighbours, and is left out
        taken = []
        for _ in range(repeats):
            begin = _now(pipeline.device)
            for way in DIRECTIONS:
                _exchange(pipeline, batch * tokens * pipeline.width, way)
            taken.append(_now(pipeline.device) - begin)
        seconds.append(statistics.median(taken))
    slope = max(0.0, seconds[2] - seconds[1]) / max(1, many - few)
    return [max(0.0, seconds[1] - slope * few), 1e3 * slope]


def _exchange(pipeline: SlicePipeline, numel: int, way: Direction) -> None:
    """As many bytes as a message of ``numel`` values has, to one neighbour and from the other."""
    codec = _codec(pipeline, numel, way)
    nbytes = numel * pipeline.dtype.itemsize
    if codec is not None:
        nbytes = round(numel * codec.bits_per_value(pipeline.dtype) / 8)
    first, last = (pipeline.is_first, pipeline.is_last)[:: 1 if way == "forward" else -1]
    works: list[Any] = []
    values = torch.zeros(2, nbytes, dtype=torch.uint8, device=pipeline.device)
    if not last:
        works.append(dist.isend(values[0], pipeline.neighbour(True, way), group=pipeline.group))
    if not first:
        works.append(dist.irecv(values[1], pipeline.neighbour(False, way), group=pipeline.group))
    for work in works:
        work.wait()


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
