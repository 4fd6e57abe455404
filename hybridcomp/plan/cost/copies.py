"""Copies between device and host where the optimizer's states lie on the host (ZeRO-Offload).

Gradients go to the host (``backward``), updated parameters come back (``forward``). The bytes are
those that the ledger counts (``patches.ds.offload12``, ``offload3``). Natively DeepSpeed waits for
each copy; encoded gradients land behind the last backward pass, where the device is no CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from hybridcomp.plan.layout import Layout

#: bytes of a value of the master weights' gradients, which lie on the host
FP32 = 4.0
#: values of one payload; longer gradients and parameters cross as several (``host_landing``)
MOST_NUMEL = 16 * 960 * 1024


@dataclass(frozen=True)
class Copying:
    """Values that cross the bus of one rank: a message whose two ends are a device and its host.

    numel: values. nbytes, back_nbytes: what upstream moves for them natively, that way and the
    other way, on average over the ranks. busiest: both of the rank that moves most, for which the
    others wait; None: the same. ranks: the ends, as ``policy`` counts them.
    """

    direction: Literal["to_host", "to_device"]
    numel: float
    nbytes: float
    back_nbytes: float = 0.0
    busiest: tuple[float, float] | None = None
    ranks: int = 2


class Whole(NamedTuple):
    """Values of the parameters of which a rank owns a part, over those that it owns.

    mean: over the ranks. most: of the rank that has most.
    """

    mean: float = 1.0
    most: float = 1.0


def copyings(
    layout: Layout, values: float, width: int, messages: float, whole: Whole
) -> tuple[Copying, Copying]:
    """One of ``messages`` gradients to the host, and one of as many parameters back.

    Args:
        values: that this rank's optimizer steps on.
        width: bytes of a value on the device.
        whole: of the parameters that it has a part of.
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


def gradient_nbytes(
    zero_stage: int, width: int, micro_batches: int, whole: float = 1.0
) -> tuple[float, float]:
    """Bytes of a gradient that DeepSpeed moves in a step, to the host and back to the device.

    It keeps sums of micro-batches on the host: each fetches the sum so far and sends the new one,
    at stage 3 the first one, too. At the end comes the sum in fp32. Stage 1 reduces once a step,
    and has that alone. At stage 2 sums are those of whole parameters, whatever part of them a rank
    owns (``async_accumulate_grad_in_cpu_via_gpu``), and ``whole`` is how many values these have for
    each that it owns (``whole_of``).

    A value of tests/training's model in bf16, whose largest parameter two ranks share (``whole``
    1.51), both ways together; the ledger of real trainings has the same to the digits shown::

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
    """How much larger parameters are than the parts of them that a rank owns at ZeRO 1 and 2.

    DeepSpeed lays the parameters of an optimizer's group one behind the other and cuts the row into
    equal parts; a parameter on a cut belongs to the ranks on both sides.

    Args:
        groups: values of every parameter of a group, in their order, and the ranks that cut it.
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
    """Values of the parameters of which each rank owns a part."""
    part, found, start = sum(sizes) / ranks, [0.0] * ranks, 0.0
    for size in sizes:
        # sums are not exact: what lies on a cut by their last digits does not cross it
        first = min(ranks - 1, int(start / part + 1e-9))
        start += size
        last = max(first, min(ranks, math.ceil(start / part - 1e-9)) - 1)
        for rank in range(first, last + 1):
            found[rank] += size
    return tuple(found)
