"""Try the most promising slicings in real steps, whose times override predictions.

Predictions (``times``) are off by some percent, and the gain of the chosen slices over equal ones
may be no larger. A trial step is a training step without effects: it runs on leaves that share
the memory of the parameters, sends through separate channels, and restores the random state and
buffers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from hybridcomp import log
from hybridcomp.channels import Channels
from hybridcomp.job import small_messages
from hybridcomp.job.together import ending
from hybridcomp.nn.slices.lengths import Slices
from hybridcomp.nn.slices.pipeline import SlicePipeline
from hybridcomp.nn.slices.stage import OnLeaves, SlicedStage, leaves_of
from hybridcomp.nn.slices.times import SliceTimes
from hybridcomp.nn.slices.timing import now, slice_times, undisturbed

#: numbers of equal slices to try
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: factors by which a call's true time may differ from its fitted time
CALLS = (2.0, 0.5)
#: most slicings to try, and the most predicted seconds of each, as a multiple of the fastest's
MOST, WORSE = 6, 1.25
#: timed turns of each slicing, after one warm-up turn that allocates
TURNS = 8
#: fraction of the turns in which a slicing must beat the predicted fastest to replace it: single
#: steps vary by more than the difference between two good slicings
OFTEN = 0.75
#: no turn begins once the trials have taken this long
LIMIT_S = 60.0


@dataclass(frozen=True)
class TriedSlices:
    """Slices, and the median over turns of the seconds that the slowest rank takes for a step.

    seconds: None if these slices were the only candidate and were used without a trial.
    """

    slices: Slices
    seconds: float | None


def chosen_slices(
    stage: SlicedStage,
    length: int,
    batch: int = 1,
    *,
    granule: int | None = None,
    repeats: int = 3,
    agree: ProcessGroup | None = None,
    turns: int = TURNS,
    limit: float = LIMIT_S,
) -> tuple[Slices, int]:
    """Choose the slices for which a pass is fastest now; return them and their granule.

    It uses the fastest slices by ``slice_times``, or others that are faster in real steps
    (``tried_slices``), and logs the trials on rank 0. Arguments as for these two functions;
    ``turns`` 0 skips the real steps.
    """
    times = slice_times(stage, length, batch, granule=granule, repeats=repeats, agree=agree)
    if not turns:
        return times.fastest(), times.granule
    tried = tried_slices(stage, times, batch, turns=turns, limit=limit, agree=agree)
    if len(tried) > 1:
        log.say(f"token slices by real steps: {describe_trials(tried, times)}")
    return tried[0].slices, times.granule


def describe_trials(tried: Sequence[TriedSlices], times: SliceTimes) -> str:
    """Describe the measured and predicted seconds of all slicings in one line."""
    texts = []
    for each in tried:
        shown = ",".join(map(str, each.slices.lengths(times.granule)))
        took = "not tried" if each.seconds is None else f"{each.seconds:.3g} s"
        texts.append(f"{shown} {took} (predicted {each.slices.seconds(times.stages):.3g})")
    return "; ".join(texts)


def candidates(times: SliceTimes, most: int = MOST, worse: float = WORSE) -> list[Slices]:
    """Return the slices that are predicted to be fastest, then others that may be faster.

    The others are the slices that would be fastest if a call, whose fitted time is the least
    certain, took ``CALLS`` times as long, and the best equal slices of the numbers ``PARTS``. The
    result has at most ``most`` distinct slicings, none predicted to take more than ``worse`` times
    as long as the first.
    """
    best = times.fastest()
    bound = worse * best.seconds(times.stages)
    others = [times.fastest(dearer=(factor - 1) * times.call) for factor in CALLS]
    even = [times.uniform(parts) for parts in PARTS if parts <= times.count]
    others += sorted(even, key=lambda way: way.seconds(times.stages))
    by_stops = {best.stops: best}
    for way in others:
        if way.seconds(times.stages) <= bound:
            by_stops.setdefault(way.stops, way)
    return list(by_stops.values())[:most]


def tried_slices(
    stage: SlicedStage,
    times: SliceTimes,
    batch: int = 1,
    *,
    turns: int = TURNS,
    limit: float = LIMIT_S,
    agree: ProcessGroup | None = None,
) -> list[TriedSlices]:
    """Time the ``candidates`` in real steps; return all of them, the chosen one first.

    The choice is the predicted fastest, unless another was faster in most turns. Every rank of
    ``agree`` calls it, and gets the same result. Gradients, the random state, buffers, the ledger
    and the stage's slices stay unchanged.

    Args:
        stage: the stage of this rank.
        times: the predicted times of its slices.
        batch: sequences of a micro-batch.
        turns: timed turns of each slicing, after an uncounted one.
        limit: seconds after which no further turn begins. The choice then uses the finished turns,
            even if there is only one.
        agree: ranks that must choose the same slices; None: all ranks of the job.
    """
    ways = candidates(times)
    if len(ways) == 1:
        return [TriedSlices(ways[0], None)]
    runs = [_Steps(stage, way.lengths(times.granule), batch) for way in ways]
    took: list[list[float]] = [[] for _ in ways]
    spent = 0.0
    with ending("trials of token slices"), undisturbed(stage.pipeline):
        for turn in range(turns + 1):
            order = range(len(ways))
            for index in order if turn % 2 else reversed(order):
                took[index].append(_slowest(runs[index], agree))
                spent += took[index][-1]
            if spent >= limit:  # ``spent`` is the same number on all ranks
                break
    counted = [each[1:] or each for each in took]
    tried = [
        TriedSlices(way, statistics.median(each)) for way, each in zip(ways, counted, strict=True)
    ]
    first = tried[_taken(counted)]
    return [first, *sorted((each for each in tried if each is not first), key=_seconds)]


def _seconds(tried: TriedSlices) -> float:
    return tried.seconds or 0.0


def _taken(took: Sequence[Sequence[float]]) -> int:
    """Return the index of the slicing to use, given each one's seconds; 0: the predicted one."""
    often = [
        index
        for index, each in enumerate(took)
        if sum(a < b for a, b in zip(each, took[0], strict=True)) >= OFTEN * len(each)
    ]
    return min([0, *often], key=lambda index: statistics.median(took[index]))


def _slowest(run: Callable[[], float], agree: ProcessGroup | None) -> float:
    """Run a step on all ranks at once; return the seconds of the slowest."""
    small_messages.wait_for_all(agree)
    return max(small_messages.gather_objects(run(), agree))


class _Steps:
    """Runs a trial step of a stage with given slices per call, and undoes its effects."""

    def __init__(self, stage: SlicedStage, lengths: Sequence[int], batch: int) -> None:
        own, module = stage.pipeline, stage.stage
        channels = own.channels()
        apart = None if channels is None else _apart(channels)
        self._pipeline = SlicePipeline(
            module, lengths, own.width, own.loss, group=own.group, dtype=own.dtype,
            device=own.device, channels=lambda: apart,
        )  # fmt: skip
        self._module, self.device = module, own.device
        self._tokens = torch.zeros((batch, sum(lengths)), dtype=torch.int64, device=own.device)

    def __call__(self) -> float:
        begin = now(self.device)
        passed = self._pipeline.forward(self._tokens, self._tokens, self._fresh())
        self._pipeline.backward(passed)
        return now(self.device) - begin

    def _fresh(self) -> OnLeaves:
        """Return the stage on new leaves, without gradients and without hooks of an engine."""
        return OnLeaves(self._module, leaves_of(self._module.parameters()))


def _apart(channels: Channels) -> Channels:
    """Return channels that encode like ``channels`` after the start step, with a new ledger."""
    ledger = channels.config.ledger.model_copy(update={"sample_every": 0})
    apart = Channels(channels.config.model_copy(update={"ledger": ledger}))
    apart.policy, apart.verdicts = channels.policy, channels.verdicts
    apart.step = max(channels.step, channels.policy.start_step)
    return apart
