"""Time steps to decide whether copies to and from the host are encoded (``offload``, ``auto``).

The cost of such a copy depends on the rest of the step: nothing else uses the bus, but decoding
competes with the optimizer for host memory, and may or may not hide behind the backward pass. So
real steps are timed, not trials: some native, some with encoded gradients, some with parameters
encoded as well, each kind in two turns. The seconds of the slowest rank count, so all ranks decide
alike. The fastest kind stays for the rest of the run and for runs resumed from its checkpoints.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridcomp.config import CompressionConfig
from hybridcomp.config.policy import Policy
from hybridcomp.dimensions import DIRECTIONS, Direction
from hybridcomp.job import saved, small_messages

#: directions that are encoded in one kind of step
Kind = tuple[Direction, ...]
NATIVE: Kind = ()
#: native steps before the first timed step, in which memory is pinned and kernels are loaded
WARM_UP = 2
#: timed steps in each turn of a kind; the turn's first step, after a change of kind, is not timed
TIMED = 3
TURNS = 2
#: required speed-up of encoded over native steps; smaller differences are noise
MARGIN = 1.02
#: keys of the state
_STATE = ("kinds", "begin", "seconds", "chosen", "medians")


@dataclass
class OffloadTuner:
    """Time each kind of step of one engine, and hold the decision.

    ``begin``: optimizer steps taken before the first measured step; None until that step.
    """

    kinds: tuple[Kind, ...]  # the native kind comes first; a single kind is not measured
    begin: int | None = None
    # seconds of timed steps, by steps since ``begin``
    seconds: dict[int, float] = field(default_factory=dict)
    chosen: int | None = None  # index of the fastest kind in ``kinds``
    medians: tuple[float, ...] = ()
    _last: float | None = None  # time at which the last step ended

    @classmethod
    def of(cls, config: CompressionConfig, policy: Policy) -> OffloadTuner:
        """Return the kinds of steps to measure, as the block asks; a single one for "always"."""
        coded: Kind = tuple(w for w in DIRECTIONS if policy.codecs.get(("offload", w)) is not None)
        if config.offload.when == "always" or not coded:
            return cls((coded,), chosen=0)
        first: tuple[Kind, ...] = (("backward",),) if len(coded) > 1 else ()
        return cls((NATIVE, *first, coded))

    def start(self, step: int, start_step: int) -> None:
        """Start measuring after ``step`` optimizer steps, unless already started.

        Every rank calls it in every step, since not every step has copies: a rank without a
        gradient makes none, and a step that overflows copies no parameter back.
        """
        if self.begin is None and len(self.kinds) > 1:
            self.begin = max(step, start_step)

    def encodes(self, direction: Direction, step: int, start_step: int) -> bool:
        """Return whether copies in ``direction`` are encoded after ``step`` optimizer steps."""
        self.start(step, start_step)
        return direction in self.kinds[self._kind(step)]

    def _kind(self, step: int) -> int:
        """Return a step's index in ``kinds``: in turn while measuring, then the chosen kind."""
        if len(self.kinds) == 1:
            return 0
        assert self.begin is not None
        turn, _ = divmod(step - self.begin - WARM_UP, TIMED + 1)
        if turn < 0:
            return 0
        if turn >= TURNS * len(self.kinds):
            return self.chosen or 0
        return turn % len(self.kinds)

    @property
    def length(self) -> int:
        """Return the number of steps until the verdict."""
        return WARM_UP + TURNS * len(self.kinds) * (TIMED + 1)

    def took(self, step: int, device: torch.device, *, skipped: bool) -> list[str]:
        """Record the end of a step begun after ``step`` steps; a collective at the last timed one.

        ``skipped``: the step overflowed and is not timed. Returns messages for the user.
        """
        if self.chosen is not None or self.begin is None or step < self.begin:
            return []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        last, self._last = self._last, time.perf_counter()
        taken = step - self.begin
        is_timed = taken >= WARM_UP and (taken - WARM_UP) % (TIMED + 1) > 0
        if is_timed and last is not None and not skipped:
            self.seconds[taken] = self._last - last
        if taken + 1 < self.length:
            return []
        return [self._decide(device)]

    def _decide(self, device: torch.device) -> str:
        found = torch.full((len(self.kinds),), float("inf"), dtype=torch.float64, device=device)
        assert self.begin is not None
        for kind in range(len(self.kinds)):
            own = [s for taken, s in self.seconds.items() if self._kind(self.begin + taken) == kind]
            if own:
                found[kind] = statistics.median(own)
        self.medians = tuple(small_messages.most(found).tolist())
        best = min(range(len(self.kinds)), key=lambda kind: self.medians[kind])
        pays = self.medians[best] * MARGIN <= self.medians[0]
        self.chosen = best if pays else 0
        return self.describe()

    def describe(self) -> str:
        """Return a sentence about the verdict."""
        assert self.chosen is not None
        parts = [
            f"{seconds * 1e3:.1f} ms {_named(kind, self.kinds)}"
            for kind, seconds in zip(self.kinds, self.medians, strict=True)
        ]
        kind = self.kinds[self.chosen]
        todo = 'native for this run; "when": "always" compresses'
        if kind:
            todo = "compressed" if len(kind) == len(self.kinds[-1]) else "only gradients compressed"
        figures = f"{', '.join(parts[:-1])} and {parts[-1]}"
        return f"offload: a step takes {figures} (compression.offload.when: auto): {todo}"

    @property
    def is_measuring(self) -> bool:
        """Return whether steps of several kinds are being timed."""
        return self.chosen is None and self.begin is not None

    @property
    def is_native(self) -> bool:
        """Return whether the verdict is native."""
        return (
            self.chosen is not None and self.kinds[self.chosen] == NATIVE and self.begin is not None
        )

    @property
    def verdict_step(self) -> int:
        """Return the number of optimizer steps taken before the verdict first applies."""
        assert self.begin is not None
        return self.begin + self.length

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty where nothing is measured."""
        if len(self.kinds) == 1 or self.begin is None:
            return {}
        kinds = [list(kind) for kind in self.kinds]
        values = (kinds, self.begin, self.seconds, self.chosen, list(self.medians))
        return dict(zip(_STATE, values, strict=True))

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Take over the state of a checkpoint; returns messages for the user.

        Ignores the state of a run whose block named other directions.
        """
        self._last = None
        if len(self.kinds) == 1 or state.get("kinds") != [list(kind) for kind in self.kinds]:
            return []
        self.begin, self.seconds = state["begin"], dict(state["seconds"])
        self.chosen, self.medians = state["chosen"], tuple(state["medians"])
        if self.chosen is None:
            return []
        return [f"{self.describe()}, as measured in the run that is continued"]


def is_pace(value: Any) -> bool:
    """Return whether ``value`` is a state of ``OffloadTuner``."""
    if value == {}:
        return True
    if not isinstance(value, dict) or set(value) != set(_STATE):
        return False
    seconds, medians, chosen = value["seconds"], value["medians"], value["chosen"]
    numbers = [*seconds.values(), *medians] if isinstance(seconds, dict) else [None]
    return (
        saved.is_count(value["begin"])
        and all(isinstance(number, (int, float)) for number in numbers)
        and (chosen is None or (saved.is_count(chosen) and chosen < len(medians)))
    )


def _named(kind: Kind, kinds: tuple[Kind, ...]) -> str:
    if not kind:
        return "natively"
    return "encoded" if kind == kinds[-1] else "with encoded gradients"
