"""Cut a chain of layers into pipeline stages, on devices that may differ.

One step of 1F1B with M micro-batches takes ``sum of the stages + (M - 1) * slowest stage``. Plain
balance, as in PipeDream (Narayanan et al. 2019), minimizes only the slowest; with few micro-batches
the sum counts as well, and unequal devices (HetPipe, Park et al. 2020) change it. So the dynamic
program keeps, for every number of layers placed and every set of devices used, the Pareto frontier
of (slowest, sum), which makes the result exact for any M.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybridcomp.tools.plan.algorithms.frontier import Linked, Point, frontier, link


@dataclass(frozen=True)
class ChainLayer:
    """One layer of a chain.

    seconds: forward and backward of one micro-batch on a device of speed 1.
    nbytes: parameters, gradients and optimizer state, and residuals that belong to them.
    activation_nbytes: kept here by one micro-batch in flight.
    send_seconds, receive_seconds: if the chain is cut behind this layer, time that the messages
        across the cut take of the stage before it, and of the stage behind it.
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


@dataclass(frozen=True)
class Cuts:
    """Stages in order: ``stops[s]`` is the first layer behind stage s, on ``devices[s]``."""

    stops: tuple[int, ...]
    devices: tuple[Device, ...]
    slowest: float  # seconds of one micro-batch on the slowest stage
    total: float  # seconds of one micro-batch through all stages

    def step_seconds(self, micro_batches: int) -> float:
        """Return the seconds of a 1F1B step."""
        return self.total + (micro_batches - 1) * self.slowest


@dataclass(frozen=True)
class _Sums:
    """Prefix sums over the layers."""

    seconds: list[float]
    nbytes: list[float]
    activations: list[float]

    @classmethod
    def of(cls, layers: Sequence[ChainLayer]) -> _Sums:
        return cls(
            [0.0, *accumulate(layer.seconds for layer in layers)],
            [0.0, *accumulate(layer.nbytes for layer in layers)],
            [0.0, *accumulate(layer.activation_nbytes for layer in layers)],
        )


def stage_cuts(
    layers: Sequence[ChainLayer],
    devices: Sequence[Device],
    micro_batches: int,
    *,
    any_order: bool = True,
) -> Cuts | None:
    """Find the fastest cut of ``layers`` into one stage a device, each of at least one layer.

    Args:
        devices: one a stage.
        micro_batches: of one step, at least 1.
        any_order: devices may be put into another order; False: stage s runs on ``devices[s]``.

    Returns None where no cut fits into the devices' memory, or there are fewer layers than devices.
    Stage s of S keeps ``min(micro_batches, S - s)`` micro-batches in flight, as 1F1B does.
    """
    stages, sums = len(devices), _Sums.of(layers)
    kinds = list(Counter(devices)) if any_order else []
    counts = tuple(Counter(devices)[kind] for kind in kinds)
    start: tuple[int, ...] = (0,) * len(kinds)
    # by (layers placed, devices used of each kind)
    states: dict[tuple[int, tuple[int, ...]], list[Point[Linked | None]]] = {
        (0, start): [Point(0.0, 0.0, None)]
    }
    for stage in range(stages):
        in_flight = min(micro_batches, stages - stage)
        grown: dict[tuple[int, tuple[int, ...]], list[Point[Linked | None]]] = {}
        for (first, used), points in states.items():
            for index, device, now in _next(devices, kinds, counts, used, stage):
                for stop, cost in _stage_costs(
                    layers, sums, first, stages - stage - 1, device, in_flight
                ):
                    grown.setdefault((stop, now), []).extend(
                        Point(
                            max(point.first, cost),
                            point.second + cost,
                            Linked(index, Linked(stop, point.choices)),
                        )
                        for point in points
                    )
        states = {state: frontier(points) for state, points in grown.items()}
    ends = [
        point for (stop, _), points in states.items() if stop == len(layers) for point in points
    ]
    if not ends:
        return None
    best = min(ends, key=lambda end: end.second + (micro_batches - 1) * end.first)
    choices = list(link(best.choices))
    order = [kinds[index] if any_order else devices[index] for index in choices[1::2]]
    return Cuts(tuple(choices[0::2]), tuple(order), best.first, best.second)


def _next(
    devices: Sequence[Device],
    kinds: Sequence[Device],
    counts: tuple[int, ...],
    used: tuple[int, ...],
    stage: int,
) -> Iterator[tuple[int, Device, tuple[int, ...]]]:
    """Yield the devices that may take the next stage, as (index, device, devices used then)."""
    if not kinds:
        yield stage, devices[stage], used
    for index, kind in enumerate(kinds):
        if used[index] < counts[index]:
            yield index, kind, (*used[:index], used[index] + 1, *used[index + 1 :])


def _stage_costs(
    layers: Sequence[ChainLayer],
    sums: _Sums,
    first: int,
    stages_left: int,
    device: Device,
    in_flight: int,
) -> Iterator[tuple[int, float]]:
    """Yield ``(stop, seconds)`` of each stage that begins at ``first`` and fits ``device``."""
    last = len(layers) - stages_left
    for stop in range(first + 1 if stages_left else len(layers), last + 1):
        if stop <= first:
            continue
        nbytes = sums.nbytes[stop] - sums.nbytes[first]
        nbytes += in_flight * (sums.activations[stop] - sums.activations[first])
        if nbytes > device.nbytes:
            if stages_left:
                break  # longer stages need even more memory
            continue
        sent = layers[stop - 1].send_seconds if stop < len(layers) else 0.0
        sent += layers[first - 1].receive_seconds if first else 0.0
        yield stop, (sums.seconds[stop] - sums.seconds[first]) / device.speed + sent
