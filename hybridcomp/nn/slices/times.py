"""What every slice of a sequence takes on the stages of a pipeline, by lines through some times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridcomp.plan.algorithms.slices import Slices, timed_slices, token_slices, uniform_slices

#: what each part of a time weighs: seconds
Line = Sequence[float]


@dataclass(frozen=True)
class StageTimes:
    """What slices take on one stage.

    first: computing and coding of a slice that begins the sequence: none of its tokens looks at
        an earlier slice, and kernels need no mask. later: of all others.
    post: what the stage itself does for the messages of a slice, both ways. arrive: until they
        are there.
    """

    first: Line
    later: Line
    post: Line
    arrive: Line

    def seconds(self, start: int, stop: int) -> float:
        """Of the slice of these tokens, until the stage can begin with the next one.

        Messages travel while the stage works on the next slice, so the longer of both counts.
        """
        message = of_message(stop - start)
        busy = weighed(self.later if start else self.first, of_computing(start, stop))
        return max(1e-9, busy + weighed(self.post, message), weighed(self.arrive, message))

    def hop(self, start: int, stop: int) -> float:
        """Seconds beyond that until a neighbour has the messages of this slice, both ways."""
        message = of_message(stop - start)
        return max(0.0, weighed(self.arrive, message) - weighed(self.post, message))


@dataclass(frozen=True)
class SliceTimes:
    """What slices of one sequence take in a pipeline: always as on the slowest of its stages.

    each: of the ranks that were timed. stages: of the pipeline. granule: slices are multiples of
    so many tokens. count: granules of the sequence.
    """

    each: Sequence[StageTimes]
    stages: int
    granule: int
    count: int

    def seconds(self, start: int, stop: int) -> float:
        """Of the slice of these granules on a stage."""
        return max(times.seconds(self.granule * start, self.granule * stop) for times in self.each)

    def hop(self, start: int, stop: int) -> float:
        """Of the messages of these granules, beyond that."""
        return max(times.hop(self.granule * start, self.granule * stop) for times in self.each)

    @property
    def call(self) -> float:
        """Seconds of a slice that do not depend on its tokens, as they were found."""
        return max(times.later[0] + times.post[0] for times in self.each)

    def fastest(self, dearer: float = 0.0) -> Slices:
        """The slices with which one pass takes least; ``dearer``: if each took so much longer.

        Their seconds are those without it.
        """

        def seconds(start: int, stop: int) -> float:
            return max(1e-9, self.seconds(start, stop) + dearer)

        found = token_slices(self.count, self.stages, seconds, self.hop)
        return self.of(found.stops) if dearer else found

    def of(self, stops: Sequence[int]) -> Slices:
        """Slices that end behind these granules."""
        return timed_slices(stops, self.seconds, self.hop)

    def uniform(self, parts: int) -> Slices:
        """So many slices, as equal as granules allow. Raises ValueError."""
        return uniform_slices(self.count, parts, self.seconds, self.hop)


def of_computing(start: int, stop: int) -> list[float]:
    """The parts of a slice's computing: a call; its tokens; pairs of them; pairs of one of them
    with one of before; and the tokens up to its end, to whose keys and values it adds gradients.

    Pairs stand for themselves, as kernels with a mask compute those that it hides.
    """
    tokens = stop - start
    return [1.0, tokens / 1e3, tokens * tokens / 1e6, tokens * start / 1e6, stop / 1e3]


def of_message(tokens: int) -> list[float]:
    """The parts of what messages take: one, and its tokens."""
    return [1.0, tokens / 1e3]


def weighed(line: Line, parts: Sequence[float]) -> float:
    """The seconds of what has these parts."""
    return sum(weight * part for weight, part in zip(line, parts, strict=True))


def fitted(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The line whose relative errors are least for what took ``seconds``, with no weight below 0.

    Relative ones: most slices are short, and theirs would be lost beside those of long ones. Of
    the few parts every subset is tried, which is exact.
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
