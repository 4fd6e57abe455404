"""Summarize a version: its sizes, its times, and the estimate by which its codec was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridcomp.errors import PublishError
from hybridcomp.publishing.choosing import CodecEstimate


@dataclass(frozen=True)
class VersionSummary:
    """One published version, equal on all ranks except for ``wait_s``.

    Attributes:
        version: its number, from 1 on.
        full: whether it can be applied without an earlier version.
        weights: number of weights; ``changed``: number of weights that differ from the previous
            version; in a full version all weights.
        nbytes: bytes of all ranks' parts.
        raw: whether changes were sent without a codec.
        compare_s, encode_s, wire_s: seconds of comparing, encoding and sending, each on its slowest
            rank.
        apply_s: seconds that the slowest receiver needed to apply the previous version; None
            without an answer.
        seconds: seconds from the version's begin until it was readable; ``wait_s``: the seconds
            that training on this rank waited for it.
        estimate: the estimate by which "auto" chose encoded or raw; None if there was no choice.
    """

    version: int
    full: bool
    weights: int
    changed: int
    nbytes: int
    raw: bool
    compare_s: float
    encode_s: float
    wire_s: float
    apply_s: float | None
    seconds: float
    wait_s: float
    estimate: CodecEstimate | None = None

    @property
    def changed_share(self) -> float:
        """Return the changed share of the weights."""
        return self.changed / max(1, self.weights)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits sent for each weight of the model."""
        return 8 * self.nbytes / max(1, self.weights)


@dataclass(frozen=True)
class StartedVersion:
    """A version being written in the background; equal on all ranks except for ``wait_s``.

    Attributes:
        version: its number.
        full: whether it can be applied without an earlier version.
        wait_s: seconds that training has waited for it on this rank.
    """

    version: int
    full: bool
    wait_s: float


def check_all(said: Sequence[Mapping[str, Any]], ranks: tuple[int, ...], what: str) -> None:
    """Raise PublishError on every rank if any rank has stated a problem."""
    bad = [
        (ranks[place], statement["problem"])
        for place, statement in enumerate(said)
        if statement["problem"]
    ]
    if bad:
        rank, problem = bad[0]
        more = f" (also rank(s) {', '.join(str(r) for r, _ in bad[1:5])})" if bad[1:] else ""
        raise PublishError.naming_rank(f"{what} was not published: rank {rank}: {problem}{more}")
