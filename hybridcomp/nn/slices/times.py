"""Estimate the times of slices of a sequence on pipeline stages by fits through measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridcomp.nn.slices.lengths import Slices, timed_slices, token_slices, uniform_slices

#: a fitted time: the weight of each of its parts, in seconds
Line = Sequence[float]


@dataclass(frozen=True)
class FittedTimes:
    """Fitted times of slices on one stage.

    first: computing and coding of a slice that begins the sequence: none of its tokens attends to
        an earlier slice, and kernels need no mask. later: of all other slices.
    post: posting the messages of a slice, both ways, by the stage itself. arrive: until they have
        arrived.
    """

    first: Line
    later: Line
    post: Line
    arrive: Line

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of the slice of these tokens, until the stage can begin the next one.

        Messages travel while the stage works on the next slice, so the longer of both counts.
        """
        message = of_message(stop - start)
        busy = weighed(self.later if start else self.first, of_computing(start, stop))
        return max(1e-9, busy + weighed(self.post, message), weighed(self.arrive, message))

    def hop(self, start: int, stop: int) -> float:
        """Return the extra seconds until a neighbour has the messages of this slice, both ways."""
        message = of_message(stop - start)
        return max(0.0, weighed(self.arrive, message) - weighed(self.post, message))


@dataclass(frozen=True)
class SliceTimes:
    """Times of slices of one sequence in a pipeline: those of the slowest stage for each slice.

    each: times of the stage of every rank that measured. stages: number of pipeline stages.
    granule: tokens of which slices are multiples. count: granules of the sequence.
    """

    each: Sequence[FittedTimes]
    stages: int
    granule: int
    count: int

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of the slice of these granules on the slowest stage."""
        return max(times.seconds(self.granule * start, self.granule * stop) for times in self.each)

    def hop(self, start: int, stop: int) -> float:
        """Return the extra seconds until a neighbour has the messages of these granules."""
        return max(times.hop(self.granule * start, self.granule * stop) for times in self.each)

    @property
    def call(self) -> float:
        """Seconds of a slice that do not depend on its tokens, as fitted."""
        return max(times.later[0] + times.post[0] for times in self.each)

    def fastest(self, dearer: float = 0.0) -> Slices:
        """Return the slices of the fastest pass, if each took ``dearer`` seconds longer.

        Their predicted seconds are without ``dearer``.
        """

        def seconds(start: int, stop: int) -> float:
            return max(1e-9, self.seconds(start, stop) + dearer)

        found = token_slices(self.count, self.stages, seconds, self.hop)
        return self.of(found.stops) if dearer else found

    def of(self, stops: Sequence[int]) -> Slices:
        """Return the slices that end behind these granules, with their predicted times."""
        return timed_slices(stops, self.seconds, self.hop)

    def uniform(self, parts: int) -> Slices:
        """Return so many slices, as equal as granules allow. Raises ValueError."""
        return uniform_slices(self.count, parts, self.seconds, self.hop)


def of_computing(start: int, stop: int) -> list[float]:
    """Return the parts of a slice's computing time: a call; its tokens; pairs of its tokens; pairs
    of one of them and an earlier one; and all tokens to its end, whose keys get gradients.

    Pairs count in full, as kernels with a mask also compute the masked ones.
    """
    tokens = stop - start
    return [1.0, tokens / 1e3, tokens * tokens / 1e6, tokens * start / 1e6, stop / 1e3]


def of_message(tokens: int) -> list[float]:
    """Return the parts of a message's time: a call, and its tokens."""
    return [1.0, tokens / 1e3]


def weighed(line: Line, parts: Sequence[float]) -> float:
    """Return the seconds of the fit ``line`` for these parts."""
    return sum(weight * part for weight, part in zip(line, parts, strict=True))


def fitted(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit the weights, none below 0, with the least relative errors against ``seconds``.

    Relative, as most slices are short, and their errors would vanish beside those of long ones.
    Tries every subset of the few parts, which is exact.
    """
    took = torch.tensor(seconds, dtype=torch.float64).unsqueeze(1)
    rows = torch.tensor(parts, dtype=torch.float64) / took
    columns, ones = rows.shape[1], torch.ones_like(took)
    best, least = [0.0] * columns, float("inf")
    for subset in range(1, 2**columns):
        used = [column for column in range(columns) if subset >> column & 1]
        found = torch.linalg.lstsq(rows[:, used], ones, driver="gelsd").solution
        error = float((rows[:, used] @ found - ones).square().sum())
        if bool((found >= 0).all()) and error < least:
            least, best = error, [0.0] * columns
            for column, weight in zip(used, found.squeeze(1).tolist(), strict=True):
                best[column] = weight
    return best
