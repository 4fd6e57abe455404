"""Price copies between device and host where optimizer states are on the host (ZeRO-Offload).

Gradients go to the host (``backward``), updated parameters come back (``forward``). States on a
drive (``states``) are read and written in each step, sub-group by sub-group. The bytes are those
that the ledger counts (``patches.ds.offload``). Natively DeepSpeed waits for each copy; encoded
gradients are copied and decoded during the last backward pass, unless the device is a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from hybridcomp.tools.plan.layout import Layout

#: bytes per value of the master weights' gradients, which are on the host
FP32 = 4.0
#: values of one payload; longer tensors are copied as several payloads (``pinned_receive_buffers``)
MOST_NUMEL = 16 * 960 * 1024
#: bytes per parameter that a step reads from a drive, and writes: master, two moments, gradient
STATES = 16.0
#: fraction of these bytes that encoded files take: with bf16 parameters, and with other parameters
#: (docs/offload.md, "States on NVMe")
BESIDE, ALONE = 0.64, 0.72


@dataclass(frozen=True)
class Copying:
    """Values that one rank copies between device and host, or between host and drive.

    numel: number of values. nbytes, back_nbytes: bytes that upstream copies natively in
    ``direction``, and back, as a mean over ranks. busiest: ``(nbytes, back_nbytes)`` of the rank
    that copies most, for which the other ranks wait; None: equal to the mean. ranks: 2, since
    ``policy`` counts device and host as ranks.
    """

    direction: Literal["to_host", "to_device", "to_drive"]
    numel: float
    nbytes: float
    back_nbytes: float = 0.0
    busiest: tuple[float, float] | None = None
    ranks: int = 2


class Whole(NamedTuple):
    """Values in all parameters of which a rank owns a part, divided by the values that it owns.

    mean: mean over the ranks. most: ratio of the rank with the most.
    """

    mean: float = 1.0
    most: float = 1.0


def copyings(
    layout: Layout, values: float, width: int, messages: float, whole: Whole
) -> tuple[Copying, Copying]:
    """Return one of ``messages`` gradient copies to the host, and one parameter copy back.

    Args:
        values: number of values that this rank's optimizer updates.
        width: bytes of a value on the device.
        whole: sizes of the parameters that the rank owns a part of (``whole_of``).
    """
    one = values / messages
    mean, most = (
        tuple(each * one for each in gradient_nbytes(layout.zero_stage, width, layout.accumulation,
                                                     share))
        for share in whole
    )  # fmt: skip
    return (
        Copying("to_host", one, mean[0], mean[1], (most[0], most[1])),
        Copying("to_device", one, width * one),
    )


def filing(values: float) -> Copying:
    """Return the states of ``values`` parameters, as they go to the drive and come from it."""
    return Copying("to_drive", STATES / FP32 * values, STATES * values, STATES * values)


def gradient_nbytes(
    zero_stage: int, width: int, micro_batches: int, whole: float = 1.0
) -> tuple[float, float]:
    """Return the bytes per gradient value that DeepSpeed copies in a step, to the host and back.

    It keeps sums of micro-batches on the host: each micro-batch fetches the sum so far (at stage 2
    all but the first) and sends the new sum. At the end the sum in fp32 is copied. Stage 1 reduces
    once a step, and copies only that sum. At stage 2 a rank sums all parameters of which it owns a
    part (``async_accumulate_grad_in_cpu_via_gpu``); ``whole`` is their number of values, divided by
    the values that the rank owns (``whole_of``).

    Example: bytes per value, both ways together, for the bf16 model of tests/training, whose
    largest parameter two ranks share (``whole`` 1.51); the ledger of real trainings has the same
    digits::

        micro-batches     1      2      3
        ZeRO 1         4.00   4.00   4.00
        ZeRO 2         4.00  13.04  19.07
        ZeRO 3         8.00  12.00  16.00
    """
    if zero_stage == 3:
        return width * micro_batches + FP32, float(width * micro_batches)
    if zero_stage == 1 or micro_batches == 1:
        return FP32, 0.0
    return width * micro_batches * whole + FP32, width * (micro_batches - 1) * whole


def whole_of(groups: Iterable[tuple[tuple[float, ...], int]]) -> Whole:
    """Return ``Whole`` for ZeRO 1 and 2: sizes of whole parameters over the parts that a rank owns.

    DeepSpeed concatenates the parameters of an optimizer's group and cuts the flat tensor into
    equal parts; a parameter on a cut belongs to the ranks on both sides.

    Args:
        groups: for each optimizer group, the sizes of its parameters in order, and the number of
            ranks that shard it.
    """
    owned = mean = most = 0.0
    for sizes, ranks in groups:
        if not sum(sizes):
            continue
        held = _held(sizes, ranks)
        owned += sum(sizes) / ranks
        mean += sum(held) / ranks
        most += max(held)
    return Whole(mean / owned, most / owned) if owned else Whole()


@lru_cache(maxsize=256)
def _held(sizes: tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return, for each rank, the size of all parameters that it owns a part of."""
    part, found, start = sum(sizes) / ranks, [0.0] * ranks, 0.0
    for size in sizes:
        # 1e-9 absorbs rounding: a parameter that ends at a cut must not count as crossing it
        first = min(ranks - 1, int(start / part + 1e-9))
        start += size
        last = max(first, min(ranks, math.ceil(start / part - 1e-9)) - 1)
        for rank in range(first, last + 1):
            found[rank] += size
    return tuple(found)
