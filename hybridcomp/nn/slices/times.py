"""Predict the times of a sequence's slices on pipeline stages by fitting measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridcomp.nn.slices.lengths import Slices, timed_slices, token_slices, uniform_slices

#: a fitted time: the weight, in seconds, of each of its parts
Line = Sequence[float]


@dataclass(frozen=True)
class FittedTimes:
    """Fitted times of slices on one stage.

    first: computing and coding a slice that begins the sequence, whose tokens attend to no earlier
        slice and whose kernels need no mask. later: the same for all other slices.
    post: time in which the stage posts the messages of a slice in both directions. arrive: time
        from the beginning of posting until these messages have arrived.
    """

    first: Line
    later: Line
    post: Line
    arrive: Line

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of a slice until the stage can begin the next one.

        Messages travel while the stage works on the next slice, so this is the longer of computing
        plus posting, and arriving.
        """
        message = of_message(stop - start)
        busy = weighed(self.later if start else self.first, of_computing(start, stop))
        return max(1e-9, busy + weighed(self.post, message), weighed(self.arrive, message))

    def hop(self, start: int, stop: int) -> float:
        """Return the extra seconds from posting this slice's messages until both have arrived."""
        message = of_message(stop - start)
        return max(0.0, weighed(self.arrive, message) - weighed(self.post, message))


@dataclass(frozen=True)
class SliceTimes:
    """Times of a sequence's slices in a pipeline; each slice's time is that of its slowest stage.

    each: fitted times of every measured rank's stage. stages: number of pipeline stages. granule:
    tokens of which every slice is a multiple. count: granules of the sequence.
    """

    each: Sequence[FittedTimes]
    stages: int
    granule: int
    count: int

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of the slice of these granules on the slowest stage."""
        return max(times.seconds(self.granule * start, self.granule * stop) for times in self.each)

    def hop(self, start: int, stop: int) -> float:
        """Return the largest ``FittedTimes.hop`` of all stages for the slice of these granules."""
        return max(times.hop(self.granule * start, self.granule * stop) for times in self.each)

    @property
    def call(self) -> float:
        """Return the fitted fixed seconds of a slice, on the slowest stage."""
        return max(times.later[0] + times.post[0] for times in self.each)

    def fastest(self, dearer: float = 0.0) -> Slices:
        """Return the slices of the fastest pass if each slice took ``dearer`` seconds longer.

        The times in the returned slices exclude ``dearer``.
        """

        def seconds(start: int, stop: int) -> float:
            return max(1e-9, self.seconds(start, stop) + dearer)

        slices = token_slices(self.count, self.stages, seconds, self.hop)
        return self.of(slices.stops) if dearer else slices

    def of(self, stops: Sequence[int]) -> Slices:
        """Return the slices that end after these granules, with their predicted times."""
        return timed_slices(stops, self.seconds, self.hop)

    def uniform(self, parts: int) -> Slices:
        """Return ``parts`` slices, as equal as granules allow. Raises ValueError."""
        return uniform_slices(self.count, parts, self.seconds, self.hop)


def of_computing(start: int, stop: int) -> list[float]:
    """Return the numbers on which a slice's computing time depends: 1 for the call; its tokens;
    its tokens squared; its tokens times earlier tokens; all tokens up to its end.

    Masked pairs count too, since kernels compute them. All tokens up to the end get key gradients.
    """
    tokens = stop - start
    return [1.0, tokens / 1e3, tokens * tokens / 1e6, tokens * start / 1e6, stop / 1e3]


def of_message(tokens: int) -> list[float]:
    return [1.0, tokens / 1e3]


def weighed(line: Line, parts: Sequence[float]) -> float:
    """Return the seconds of the fit ``line`` for these parts."""
    return sum(weight * part for weight, part in zip(line, parts, strict=True))


def fitted(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit non-negative weights with the least relative errors against ``seconds``.

    Errors are relative, since absolute errors of the many short slices would be negligible against
    those of long slices. The fit tries every subset of the few parts, so it is exact.
    """
    took = torch.tensor(seconds, dtype=torch.float64, device="cpu").unsqueeze(1)
    rows = torch.tensor(parts, dtype=torch.float64, device="cpu") / took
    columns, ones = rows.shape[1], torch.ones_like(took)
    best, least = [0.0] * columns, float("inf")
    for subset in range(1, 2**columns):
        used = [column for column in range(columns) if subset >> column & 1]
        line = torch.linalg.lstsq(rows[:, used], ones, driver="gelsd").solution
        error = float((rows[:, used] @ line - ones).square().sum())
        if bool((line >= 0).all()) and error < least:
            least, best = error, [0.0] * columns
            for column, weight in zip(used, line.squeeze(1).tolist(), strict=True):
                best[column] = weight
    return best
