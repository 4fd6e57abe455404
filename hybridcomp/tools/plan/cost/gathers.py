"""Price ZeRO 3's gathers and its sub-groups by the settings that DeepSpeed has for them.

This module simulates a pass as the policy ``memory: planned`` does in a run
(``autotune.zero3_moves``), on the trace that DeepSpeed would record of the model. In a long trace
it counts each layer as a single module, which never underestimates the memory that a step needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hybridcomp.autotune.zero3_moves import (
    Event,
    GatherChoice,
    Knobs,
    Moves,
    Trace,
    choose,
    simulate,
)
from hybridcomp.tools.plan.models.model import ModelLayer

#: values of a parameter that stays gathered (``stage3_param_persistence_threshold``)
PERSISTENT = 1e5
#: largest number of modules in a trace in which every parameter counts as a module
MODULES = 40
#: number of sub-groups if some stay on the device, and DeepSpeed's default sub-group size
SUB_GROUPS, DEFAULT_SUB_GROUP = 32, 10**9
#: the room for gathered parameters is rounded to this fraction of a model's parameters
ROOMS = 16
#: DeepSpeed's settings by default, and those of a layout whose gathers are still to be planned
DEFAULT, TIGHT = Knobs(5 * 10**7, 10**9, 10**9), Knobs(0, 0, 0)

#: sizes of a layer's parameters, and the fraction of the layer that trains
Sizes = tuple[tuple[int, ...], float]


class Gathered(NamedTuple):
    """The gathers of a micro-batch.

    times: gathered values, divided by the values of all parameters that are freed after use. peak:
    most values present at once, persistent parameters included.
    """

    times: float
    peak: float


@dataclass(frozen=True)
class ModelPass:
    """Parameters in the order in which a micro-batch uses them.

    layers: parameter sizes by layer. recompute: segments of layers that run forward a second time.
    tied: whether the last layer also uses the first layer's largest parameter.
    """

    layers: tuple[Sizes, ...]
    recompute: tuple[tuple[int, int], ...]
    tied: bool

    @classmethod
    def of(
        cls, layers: Sequence[ModelLayer], recompute: tuple[tuple[int, int], ...], tied: bool
    ) -> ModelPass:
        """Return the pass of a model's layers; ``tied``: the head's weight is the embedding's."""
        found = []
        for layer in layers:
            sizes = [*(layer.tensors or (layer.parameters,))]
            sizes += layer.expert_tensors or (layer.expert_parameters,)
            found.append((tuple(int(size) for size in sizes if size), 1 - layer.frozen))
        if tied:
            last, trains = found[-1]
            found[-1] = tuple(sorted(last)[:-1]), trains
        return cls(tuple(found), recompute, tied)

    def gathered(self, knobs: Knobs) -> Gathered:
        """Simulate a micro-batch with the settings ``knobs``."""
        trace, moves = _trace_of(self), _simulated(self, knobs)
        return Gathered(moves.gathered / max(1, trace.moved), moves.peak + _resident(trace))

    def chosen(self, room: float) -> Knobs | None:
        """Return the settings that gather least within ``room`` values; None: too little room."""
        trace, least = _trace_of(self), _simulated(self, TIGHT).peak
        free = room - _resident(trace)
        if free < least:
            return None
        step = max(1, math.ceil((trace.moved - least) / ROOMS))
        limit = least + step * int((min(free, trace.moved + step) - least) // step)
        found = _chosen(self, limit)
        return None if found is None else found.knobs

    def sub_group(self, ranks: int) -> int:
        """Return the ``sub_group_size`` that gives a rank's optimizer ``SUB_GROUPS`` sub-groups."""
        return max(1, math.ceil(sum(_parts(self, ranks)) / SUB_GROUPS))

    def on_drive(self, ranks: int, room: float) -> float:
        """Return the fraction of states on the drive if the host keeps those of ``room`` values.

        The host keeps the first of ``SUB_GROUPS`` sub-groups, as the policy does in a run.
        """
        groups = _sub_groups(self, ranks, self.sub_group(ranks))
        kept = itertools.takewhile(lambda values: values <= room, itertools.accumulate(groups))
        return 1 - max(kept, default=0) / max(1, sum(groups))

    def on_host(self, ranks: int, ratio: float, sub_group: int) -> float:
        """Return the fraction of a rank's parameters whose optimizer steps on the host.

        DeepSpeed ends a sub-group after the parameter that fills it, and steps the first
        ``int((1 - ratio) * groups)`` sub-groups on the device. ``sub_group``: size of a sub-group;
        0: DeepSpeed's default.
        """
        groups = _sub_groups(self, ranks, sub_group or DEFAULT_SUB_GROUP)
        return sum(groups[int((1 - ratio) * len(groups)) :]) / max(1, sum(groups))


@lru_cache(maxsize=256)
def _trace_of(model: ModelPass) -> Trace:
    """Return the pass as DeepSpeed records it."""
    is_long = sum(len(own) for own, _ in model.layers) > MODULES
    params: list[int] = []
    uses: list[tuple[int, ...]] = []
    modules: list[list[int]] = []
    for own, _ in model.layers:
        places = range(len(params), len(params) + len(own))
        every = [tuple(places)] if is_long else [(place,) for place in places]
        modules.append(list(range(len(uses), len(uses) + len(every))))
        params += own
        uses += every
    if model.tied:
        largest = max(range(len(model.layers[0][0])), key=params.__getitem__)
        if is_long:
            uses[-1] = (*uses[-1], largest)
        else:
            uses.append((largest,))
            modules[-1].append(len(uses) - 1)
    order = [(one, True) for own in modules for one in own]
    starts = {stop - 1: start for start, stop in model.recompute}
    for layer in reversed(range(len(modules))):
        for again in range(starts.get(layer, layer + 1), layer + 1):
            order += [(one, True) for one in modules[again]]
        if model.layers[layer][1]:
            order += [(one, False) for one in reversed(modules[layer])]
    events = (Event(one, begins, way) for one, way in order for begins in (True, False))
    stay = frozenset(place for place, size in enumerate(params) if size <= PERSISTENT)
    return Trace(tuple(events), uses, params, stay)


def _resident(trace: Trace) -> int:
    return sum(trace.sizes[place] for place in trace.persistent)


@lru_cache(maxsize=4096)
def _simulated(model: ModelPass, knobs: Knobs) -> Moves:
    return simulate(_trace_of(model), knobs)


@lru_cache(maxsize=4096)
def _chosen(model: ModelPass, limit: int) -> GatherChoice | None:
    return choose(_trace_of(model), limit)


def _parts(model: ModelPass, ranks: int) -> list[int]:
    return [
        math.ceil(trains * size / ranks)
        for own, trains in model.layers if trains for size in own
    ]  # fmt: skip


@lru_cache(maxsize=4096)
def _sub_groups(model: ModelPass, ranks: int, least: int) -> tuple[int, ...]:
    """Return the values of a rank's sub-groups, each of ``least`` or more but the last."""
    groups = [0]
    for part in _parts(model, ranks):
        if groups[-1] >= least:
            groups.append(0)
        groups[-1] += part
    return tuple(groups)
