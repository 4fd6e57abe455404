"""Compare native and encoded steps of the run itself, in turns, to confirm or change verdicts.

A trial times messages alone. In a step they compete with each other and with the model's work,
which hides wire time but no codec time. So if a trial was close or encoding won, then once the run
is warm:

1. ``REHEARSED`` steps run: one with all dimensions native, one with all encoded. They allocate the
   buffers and residuals of both modes, and are not counted;
2. a round of ``CELLS`` steps runs, in which up to three dimensions take every combination of modes;
3. the seconds of the slowest rank count, so all ranks decide alike. Steps are compared in pairs
that differ only in one dimension. A dimension changes its mode if the other mode was faster in
every pair and by ``GAIN`` in the median, and stays if the median gain is below half of that. If a
dimension is in between, a second round follows, in which one pair of eight may disagree. A change
back to native needs only a gain of ``BACK``, and after the second round only in the median:
otherwise two dimensions that each cost two per cent would stay encoded.

If the other mode loses clearly (``SURELY``) in every pair of the first steps, the comparison ends
there, after two or three steps in the slower mode.

The mode depends only on the number of the step, which is equal on all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridcomp.dimensions import Dimension
from hybridcomp.job import small_messages

#: number of uncounted steps before the first round
REHEARSED = 2
#: maximum dimensions of a comparison; a round has every combination of their modes
MOST = 3
CELLS = 1 << MOST
#: fraction of a step's time that a change of mode must save: to encoding, and back to native
GAIN, BACK = 0.03, 0.01
ROUNDS = 2
#: fraction of a step's time by which the other mode must be slower in the first pair to end the
#: comparison there; after n pairs, 1/n of this in every pair
SURELY = 0.3


@dataclass(frozen=True)
class StepComparison:
    """Step times of one dimension in both modes, and whether it should change its mode."""

    native_s: float
    coded_s: float
    changes: bool


class StepClock:
    """Clock of a run's steps from ``first`` up to ``stop``, each from its first forward pass."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self._steps = first, steps
        self._starts: dict[int, Any] = {}
        self._stops: dict[int, Any] = {}

    @property
    def stop(self) -> int:
        """Return the first step that is no longer timed."""
        return self.first + self._steps

    def covers(self, step: int) -> bool:
        return self.first <= step < self.stop

    def open(self, step: int, device: torch.device) -> None:
        """Start the clock of ``step`` at its first forward pass; later calls do nothing.

        So the time between two steps (an evaluation, a checkpoint, waiting for data) is not
        counted.
        """
        if self.covers(step) and step not in self._starts:
            self._starts[step] = _mark(device)

    def reopen(self, step: int) -> None:
        """Discard the start of ``step``, which was skipped: its time so far does not count."""
        self._starts.pop(step, None)

    def close(self, step: int, device: torch.device) -> None:
        """Stop the clock of the step before ``step``, on a GPU after its queued work."""
        self._stops[step - 1] = _mark(device)

    def slowest(self, begin: int, stop: int, device: torch.device) -> list[float]:
        """Return the seconds of the slowest rank in each step; a collective over the job.

        A step that was not timed, as in a resumed run, counts 0. On a GPU it waits for the steps'
        work.
        """
        mine = torch.tensor(
            [self._seconds(s) for s in range(begin, stop)], dtype=torch.float64, device="cpu"
        )
        seconds: list[float] = small_messages.most(mine.to(device)).tolist()
        return seconds

    def _seconds(self, step: int) -> float:
        """Return a step's seconds, from the last step's end if its start was not recorded."""
        start, stop = self._starts.get(step, self._stops.get(step - 1)), self._stops.get(step)
        return 0.0 if start is None or stop is None else _between(start, stop)


class Recheck(StepClock):
    """A comparison of an engine's steps: compared dimensions, first step, and clock."""

    def __init__(self, names: Sequence[Dimension], first: int) -> None:
        assert 0 < len(names) <= MOST
        super().__init__(first, 0)
        self.names = tuple(names)
        self.rounds = 1
        self._cut: int | None = None

    @property
    def stop(self) -> int:
        """Return the first step after the comparison."""
        if self._cut is not None:
            return self._cut
        return self.first + REHEARSED + self.rounds * CELLS

    @property
    def last(self) -> int:
        """Return the last step of the comparison if all rounds are needed."""
        return self.first + REHEARSED + ROUNDS * CELLS - 1

    def coded(self, name: Dimension, step: int) -> bool | None:
        """Return whether ``name`` is encoded in ``step``; None outside of the comparison."""
        if name not in self.names or not self.covers(step):
            return None
        turn = step - self.first
        if turn < REHEARSED:
            return turn == 1
        return bool((turn - REHEARSED) >> self.names.index(name) & 1)

    def end_early(self, step: int, pays: Mapping[Dimension, bool], device: torch.device) -> None:
        """End before ``step`` if the pairs so far are clear; a collective after some of its steps.

        ``pays``: whether each dimension is encoded now. On a GPU waits for the work of those steps.
        """
        begin, cells = self.first + REHEARSED, 1 << len(self.names)
        if not begin < step < self.stop or self.rounds > 1 or (step - begin) % cells:
            return
        seconds = self.slowest(begin, step, device)
        pairs = {name: self._pairs(name, seconds) for name in self.names}
        if all(
            pair and all(p[not pays[n]] >= (1 + SURELY / len(pair)) * p[pays[n]] for p in pair)
            for n, pair in pairs.items()
        ):
            self._cut = step

    def judge(
        self, pays: Mapping[Dimension, bool], device: torch.device
    ) -> dict[Dimension, StepComparison] | None:
        """Decide at ``stop``; return None if another round is needed. A collective over the job.

        ``pays``: whether each dimension is encoded now.
        """
        seconds = self.slowest(self.first + REHEARSED, self.stop, device)
        findings = {name: self._judged(name, pays[name], seconds) for name in self.names}
        if self.rounds < ROUNDS and any(finding is None for finding in findings.values()):
            self.rounds += 1
            return None
        return {
            name: StepComparison(0.0, 0.0, False) if finding is None else finding
            for name, finding in findings.items()
        }

    def _judged(
        self, name: Dimension, pays: bool, seconds: Sequence[float]
    ) -> StepComparison | None:
        """Return the result for ``name``; None if it is unclear and another round may follow."""
        pairs = self._pairs(name, seconds)
        last = self.rounds == ROUNDS
        if len(pairs) < CELLS // 2 and self._cut is None:
            return None
        native_s, coded_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        if self._cut is not None:
            return StepComparison(native_s, coded_s, False)
        now, other = (1, 0) if pays else (0, 1)
        gains = [(pair[now] - pair[other]) / pair[now] for pair in pairs]
        gain, agree = statistics.median(gains), sum(gained > 0 for gained in gains)
        wanted = BACK if pays else GAIN
        agreed = agree >= len(gains) - len(gains) // CELLS
        if gain >= wanted and (agreed or (last and pays)):
            return StepComparison(native_s, coded_s, True)
        if gain < wanted / 2 or last:
            return StepComparison(native_s, coded_s, False)
        return None

    def _pairs(self, name: Dimension, seconds: Sequence[float]) -> list[tuple[float, float]]:
        """Return native and encoded seconds of each pair of steps that differ only in ``name``."""
        bit = 1 << self.names.index(name)
        cells = ((seconds[i], seconds[i + bit]) for i in range(len(seconds)) if not i & bit)
        return [pair for pair in cells if min(pair) > 0]


def describe_finding(name: Dimension, finding: StepComparison, pays: bool, step: int) -> str:
    """Describe a result in a sentence; ``pays``: the decision, ``step``: the first step after."""
    if not finding.native_s:
        seen = "too few steps were seen to compare"
    else:
        seen = (
            f"steps took {finding.native_s * 1e3:.1f} ms natively and "
            f"{finding.coded_s * 1e3:.1f} ms encoded, in turns"
        )
    todo = "compressed" if pays else "native"
    how = f"{todo} from step {step} on" if finding.changes else f"stays {todo}"
    return f"{name}: {seen} (compression.{name}.when: auto): {how}"


def _mark(device: torch.device) -> Any:
    """Return the current time: host seconds, or an event behind the work queued on the GPU."""
    if device.type != "cuda":
        return now()
    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    """Return the seconds between two marks; waits for the device."""
    if isinstance(stop, float):
        return stop - float(start)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


#: the host clock, which tests replace
now: Callable[[], float] = time.perf_counter
