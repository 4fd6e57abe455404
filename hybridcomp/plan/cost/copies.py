"""Copies between device and host where the optimizer's states lie on the host (ZeRO-Offload).

Gradients go to the host (``backward``), updated parameters come back (``forward``). The bytes are
those that the ledger counts (``patches.ds.offload12``, ``offload3``). Natively DeepSpeed waits for
each copy; encoded gradients land behind the last backward pass, where the device is no CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridcomp.plan.layout import Layout

#: bytes of a value of the master weights' gradients, which lie on the host
FP32 = 4.0
#: values of one payload; longer gradients and parameters cross as several (``host_landing``)
MOST_NUMEL = 16 * 960 * 1024


@dataclass(frozen=True)
class Copying:
    """Values that cross the bus of one rank: a message whose two ends are a device and its host.

    numel: values. nbytes, back_nbytes: what upstream moves for them natively, that way and the
    other way. ranks: the ends, as ``policy`` counts them.
    """

    direction: Literal["to_host", "to_device"]
    numel: float
    nbytes: float
    back_nbytes: float = 0.0
    ranks: int = 2


def copyings(layout: Layout, values: float, width: int, messages: float) -> tuple[Copying, Copying]:
    """One of ``messages`` gradients to the host, and one of as many parameters back.

    Args:
        values: that this rank's optimizer steps on.
        width: bytes of a value on the device.
    """
    there, back = gradient_nbytes(layout.zero_stage, width, layout.accumulation)
    one = values / messages
    return (
        Copying("to_host", one, there * one, back * one),
        Copying("to_device", one, width * one),
    )


def gradient_nbytes(zero_stage: int, width: int, micro_batches: int) -> tuple[float, float]:
    """Bytes of a gradient that DeepSpeed moves in a step, to the host and back to the device.

    It keeps sums of micro-batches on the host: each fetches the sum so far and sends the new one,
    at stage 3 the first one, too. At the end comes the sum in fp32. Stage 1 reduces once a step,
    and has that alone. (At stage 2 sums of parameters that two ranks share are moved whole by both,
    which is not counted.)
    """
    if zero_stage == 3:
        return width * micro_batches + FP32, float(width * micro_batches)
    if zero_stage == 1 or micro_batches == 1:
        return FP32, 0.0
    return width * micro_batches + FP32, float(width * (micro_batches - 1))
