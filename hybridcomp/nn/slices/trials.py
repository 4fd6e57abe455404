"""Real steps in some ways of slicing, so that a step and not a line has the last word.

Lines through times (``times``) are off by some percent, and so much may lie between the slices that
they choose and equal ones. A trial step is one of training but for what it would leave behind: it
runs on leaves that share the memory of the parameters, sends through channels of its own, and puts
the random state and buffers back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridcomp import log
from hybridcomp.channels import Channels
from hybridcomp.nn.slices.pipeline import SlicePipeline
from hybridcomp.nn.slices.stage import OnLeaves, SlicedStage, leaves_of
from hybridcomp.nn.slices.times import SliceTimes
from hybridcomp.nn.slices.timing import now, slice_times, undisturbed
from hybridcomp.plan.algorithms.slices import Slices

#: how many equal slices may be tried
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: how much dearer a call may be than it was found to be
CALLS = (2.0, 0.5)
#: ways that are tried, at most, and how much longer than the fastest they may be predicted to take
MOST, WORSE = 6, 1.25
#: turns of all ways, behind one that allocates
TURNS = 8
#: share of the turns in which other slices have to be faster than the predicted ones to be taken
#: instead: a machine's moods move single steps by more than lies between two good ways
OFTEN = 0.75
#: no turn begins once the trials have taken so many seconds
LIMIT_S = 60.0


@dataclass(frozen=True)
class Tried:
    """A way of slicing and the seconds of its steps on the slowest rank, the median of its turns.

    seconds: None where one way alone was worth a trial, so that none was made.
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
    """The slices with which one pass is fastest at this moment; and their granule.

    Those that are by ``slice_times``, or equal ones that are faster in real steps of both
    (``tried_slices``). Rank 0 tells what was tried. Arguments as of these two; ``turns`` 0 leaves
    the steps out.
    """
    times = slice_times(stage, length, batch, granule=granule, repeats=repeats, agree=agree)
    if not turns:
        return times.fastest(), times.granule
    tried = tried_slices(stage, times, batch, turns=turns, limit=limit, agree=agree)
    if len(tried) > 1:
        log.say(f"token slices by real steps: {told(tried, times)}")
    return tried[0].slices, times.granule


def told(tried: Sequence[Tried], times: SliceTimes) -> str:
    """What each way took and was predicted to take, in a line."""
    texts = []
    for each in tried:
        shown = ",".join(map(str, each.slices.lengths(times.granule)))
        took = "not tried" if each.seconds is None else f"{each.seconds:.3g} s"
        texts.append(f"{shown} {took} (predicted {each.slices.seconds(times.stages):.3g})")
    return "; ".join(texts)


def candidates(times: SliceTimes, most: int = MOST, worse: float = WORSE) -> list[Slices]:
    """The slices that are predicted to be fastest, and others that may be so.

    These are what would be fastest if a call took ``CALLS`` times as long as it was found to, which
    is what times of single slices know least, and the best of the equal ones, as many as ``PARTS``
    says. At most ``most`` ways, none of which is predicted to take more than ``worse`` times as
    long as the first. The same slices stand there once.
    """
    best = times.fastest()
    bound = worse * best.seconds(times.stages)
    others = [times.fastest(dearer=(factor - 1) * times.call) for factor in CALLS]
    even = [times.uniform(parts) for parts in PARTS if parts <= times.count]
    others += sorted(even, key=lambda way: way.seconds(times.stages))
    found = {best.stops: best}
    for way in others:
        if way.seconds(times.stages) <= bound:
            found.setdefault(way.stops, way)
    return list(found.values())[:most]


def tried_slices(
    stage: SlicedStage,
    times: SliceTimes,
    batch: int = 1,
    *,
    turns: int = TURNS,
    limit: float = LIMIT_S,
    agree: ProcessGroup | None = None,
) -> list[Tried]:
    """The ``candidates`` by the real steps of this moment, what is to be taken first.

    That is what is predicted to be fastest, unless another one was faster in most turns. Every
    rank of ``agree`` calls it (None: of the whole job); all get the same answer. Gradients, the
    random state, buffers, the ledger and the stage's slices stay what they are.

    Args:
        stage: this rank's.
        times: what its slices take.
        batch: sequences of a micro-batch.
        turns: how often each way takes its turn, behind one that does not count.
        limit: no turn begins after so many seconds. What is known then counts; where even the
            first turn took longer, that is it.
        agree: ranks that slice alike.
    """
    ways = candidates(times)
    if len(ways) == 1:
        return [Tried(ways[0], None)]
    runs = [_Steps(stage, way.lengths(times.granule), batch) for way in ways]
    took: list[list[float]] = [[] for _ in ways]
    spent = 0.0
    with undisturbed(stage.pipeline):
        for turn in range(turns + 1):
            order = range(len(ways))
            for index in order if turn % 2 else reversed(order):
                took[index].append(_slowest(runs[index], agree))
                spent += took[index][-1]
            if spent >= limit:  # the same number on all ranks
                break
    counted = [each[1:] or each for each in took]
    found = [Tried(way, statistics.median(each)) for way, each in zip(ways, counted, strict=True)]
    first = found[_taken(counted)]
    return [first, *sorted((each for each in found if each is not first), key=_seconds)]


def _seconds(tried: Tried) -> float:
    return tried.seconds or 0.0


def _taken(took: Sequence[Sequence[float]]) -> int:
    """Which way is taken, by the seconds of each in all turns; the first one is the predicted."""
    often = [
        index
        for index, each in enumerate(took)
        if sum(a < b for a, b in zip(each, took[0], strict=True)) >= OFTEN * len(each)
    ]
    return min([0, *often], key=lambda index: statistics.median(took[index]))


def _slowest(run: Callable[[], float], agree: ProcessGroup | None) -> float:
    """Seconds of a step on the slowest rank; all begin together."""
    dist.barrier(agree)
    every: list[float] = [0.0] * dist.get_world_size(agree)
    dist.all_gather_object(every, run(), group=agree)
    return max(every)


class _Steps:
    """Steps of a stage in some slices that leave nothing behind; calling it runs one."""

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
        """Seconds of one forward and backward pass on this rank."""
        begin = now(self.device)
        passed = self._pipeline.forward(self._tokens, self._tokens, self._fresh())
        self._pipeline.backward(passed)
        return now(self.device) - begin

    def _fresh(self) -> OnLeaves:
        """The stage on leaves of its own: no gradient and no hook of an engine knows of them."""
        return OnLeaves(self._module, leaves_of(self._module.parameters()))


def _apart(channels: Channels) -> Channels:
    """Channels that encode as ``channels`` will once the block has begun, with a ledger apart."""
    ledger = channels.config.ledger.model_copy(update={"sample_every": 0})
    found = Channels(channels.config.model_copy(update={"ledger": ledger}))
    found.policy, found.verdicts = channels.policy, channels.verdicts
    found.step = max(channels.step, channels.policy.start_step)
    return found
