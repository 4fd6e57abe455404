"""Order the forward and backward passes of a stage: 1F1B, plain or interleaved.

Plain 1F1B is PipeDream-flush (Narayanan et al. 2021, section 2.2), as DeepSpeed's ``TrainSchedule``
and Megatron do it; interleaved stages follow Megatron's ``forward_backward_pipelining_with_
interleaving``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from hybridcomp.tools.plan.layout import Layout


class Op(NamedTuple):
    """One pass of a chunk of a stage over one micro-batch."""

    backward: bool
    chunk: int
    micro_batch: int


class Task(NamedTuple):
    """A stretch of a step in which one resource is at work, in seconds from the step's start.

    what: "forward", "backward", "send", "reduce", "code", "to_host", "adam", "to_device" or
    "gather". stage, chunk, micro_batch: those of the pass or message. resource: a stage's device,
    its link to the next stage or to its replicas, its drive, or its bus to the host.
    """

    what: str
    stage: int
    chunk: int
    micro_batch: int
    resource: str
    start: float
    end: float


@lru_cache(maxsize=1024)
def order(
    stage: int, stages: int, virtual: int, micro_batches: int, slices: int = 1
) -> tuple[Op, ...]:
    """Return the passes of ``stage``, first to last.

    ``slices``: number of slices of every micro-batch, in a pipeline over token slices;
    ``Op.micro_batch`` then counts the slices of all micro-batches.
    """
    if slices > 1:
        return tuple(_sliced(micro_batches, slices))
    total = virtual * micro_batches
    warm = stages - stage - 1
    if virtual > 1:
        warm = 2 * warm + (virtual - 1) * stages
    warm = min(warm, total)
    ahead = list(_passes(stages, virtual, micro_batches, False))
    behind = list(_passes(stages, virtual, micro_batches, True))
    ops = ahead[:warm]
    for index in range(total - warm):
        ops += [ahead[warm + index], behind[index]]
    return (*ops, *behind[total - warm :])


def _sliced(micro_batches: int, slices: int) -> Iterator[Op]:
    """Yield a micro-batch's slices forward, then backward from the last one (``nn.slices``)."""
    for start in range(0, micro_batches * slices, slices):
        yield from (Op(False, 0, start + index) for index in range(slices))
        yield from (Op(True, 0, start + index) for index in reversed(range(slices)))


def _passes(stages: int, virtual: int, micro_batches: int, backward: bool) -> Iterator[Op]:
    """Yield the passes of one direction: each chunk takes ``stages`` micro-batches in turn."""
    if virtual == 1:
        yield from (Op(backward, 0, index) for index in range(micro_batches))
        return
    for start in range(0, micro_batches, stages):
        for chunk in range(virtual):
            for index in range(start, min(start + stages, micro_batches)):
                yield Op(backward, virtual - 1 - chunk if backward else chunk, index)


@lru_cache(maxsize=4096)
def in_flight(stage: int, stages: int, virtual: int, micro_batches: int, slices: int = 1) -> int:
    """Return the most chunk passes whose activations a stage keeps at once."""
    kept = most = 0
    for op in order(stage, stages, virtual, min(micro_batches, 2 * stages), slices):
        kept += -1 if op.backward else 1
        most = max(most, kept)
    return most


def layout_in_flight(layout: Layout, stage: int) -> int:
    """Return ``in_flight`` of a stage of ``layout``."""
    return in_flight(stage, layout.stages, layout.virtual, layout.accumulation, layout.slice_count)
