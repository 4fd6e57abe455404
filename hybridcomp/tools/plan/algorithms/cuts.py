"""Cut a chain of layers into pipeline stages, on devices that may differ.

One step of 1F1B with M micro-batches takes ``sum of the stages + (M - 1) * slowest stage``. Plain
balance, as in PipeDream (Narayanan et al. 2019), minimizes only the slowest stage; with few
micro-batches the sum counts as well, and it depends on the cut if devices are unequal (HetPipe,
Park et al. 2020). So the dynamic program keeps, for every number of layers placed, the Pareto
frontier of (slowest, sum), which makes the result exact for any M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybridcomp.tools.plan.algorithms.frontier import Linked, Point, frontier, link


@dataclass(frozen=True)
class ChainLayer:
    """One layer of a chain.

    seconds: forward and backward of one micro-batch on a device of speed 1.
    nbytes: parameters, gradients and optimizer state, and residuals that belong to them.
    activation_nbytes: activations that the layer keeps for each micro-batch in flight.
    send_seconds, receive_seconds: if the chain is cut after this layer, seconds that the messages
    across the cut cost the earlier stage, and the later stage.
    """

    seconds: float
    nbytes: float = 0.0
    activation_nbytes: float = 0.0
    send_seconds: float = 0.0
    receive_seconds: float = 0.0


@dataclass(frozen=True)
class Device:
    """One stage's device (or its group of equal ones): speed 0.5 takes twice the seconds."""

    speed: float = 1.0
    nbytes: float = float("inf")


def stage_cuts(
    layers: Sequence[ChainLayer], devices: Sequence[Device], micro_batches: int
) -> tuple[int, ...] | None:
    """Find the fastest cut of ``layers`` into one stage a device, each of at least one layer.

    Returns, for each stage, the index after its last layer; None where no cut fits into the
    devices' memory, or there are fewer layers than devices. Stage s of S runs on ``devices[s]`` and
    keeps ``min(micro_batches, S - s)`` micro-batches in flight, as 1F1B does.
    """
    stages = len(devices)
    # prefix sums of seconds, bytes and activation bytes
    sums = [
        [0.0, *accumulate(getattr(layer, name) for layer in layers)]
        for name in ("seconds", "nbytes", "activation_nbytes")
    ]
    # by layers placed
    states: dict[int, list[Point]] = {0: [Point(0.0, 0.0, None)]}
    for stage, device in enumerate(devices):
        in_flight, left = min(micro_batches, stages - stage), stages - stage - 1
        grown: dict[int, list[Point]] = {}
        for first, points in states.items():
            for stop, cost in _stage_costs(layers, sums, first, left, device, in_flight):
                grown.setdefault(stop, []).extend(
                    Point(max(point.first, cost), point.second + cost, Linked(stop, point.choices))
                    for point in points
                )
        states = {stop: frontier(points) for stop, points in grown.items()}
    ends = states.get(len(layers))
    if not ends:
        return None
    best = min(ends, key=lambda end: end.second + (micro_batches - 1) * end.first)
    return tuple(link(best.choices))


def _stage_costs(
    layers: Sequence[ChainLayer],
    sums: Sequence[Sequence[float]],
    first: int,
    stages_left: int,
    device: Device,
    in_flight: int,
) -> Iterator[tuple[int, float]]:
    """Yield ``(stop, seconds)`` of each stage that begins at ``first`` and fits ``device``."""
    for stop in range(first + 1 if stages_left else len(layers), len(layers) - stages_left + 1):
        if stop <= first:
            continue
        seconds, nbytes, activations = (of[stop] - of[first] for of in sums)
        if nbytes + in_flight * activations > device.nbytes:
            if stages_left:
                break  # longer stages need even more memory
            continue
        sent = layers[stop - 1].send_seconds if stop < len(layers) else 0.0
        sent += layers[first - 1].receive_seconds if first else 0.0
        yield stop, seconds / device.speed + sent
