"""Record the messages of tp and pp in the first steps, and plan trials of them.

Under ``"when": "auto"`` these messages are native until then. Each group, or pair of stages, is
handled separately: its ranks count the same messages, so they plan the same trial. They compare
their plans first, since a rank that waits for a message that no rank sends would hang.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridcomp.autotune.trials import PlannedMessage
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.dimensions import Dimension, Direction
from hybridcomp.job.agreement import tell


@dataclass(frozen=True)
class Kind:
    """A kind of messages, which differ only in values."""

    ranks: Ranks  # ranks of the group; sender and receiver of a send
    is_send: bool
    direction: Direction
    dtype: torch.dtype
    numel: int
    codec: Codec

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def stated(self) -> str:
        """Return a description, equal on all ranks of the kind, by which ranks also sort kinds."""
        how = [self.ranks, self.is_send, self.direction, str(self.dtype), self.numel]
        return json.dumps([*how, self.codec.spec])


class SeenMessages(NamedTuple):
    """Messages of a dimension to time.

    Attributes:
        plan: messages of this rank.
        nbytes: bytes of the largest message in the job; 0: no message was counted by all ranks that
            take part in it.
        stated: descriptions of all messages in the job that will be timed.
    """

    plan: list[PlannedMessage]
    nbytes: int
    stated: list[str]


class TrafficProfile:
    """Count messages of dimensions that have no verdict yet."""

    def __init__(self, dimensions: Iterable[Dimension]) -> None:
        #: message counts by dimension without a verdict
        self.counts: dict[Dimension, Counter[Kind]] = {name: Counter() for name in dimensions}
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self._steps = 0

    @property
    def waiting(self) -> tuple[Dimension, ...]:
        return tuple(self.counts)

    def note(
        self,
        dimension: Dimension,
        codec: Codec,
        numel: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        direction: Direction,
        between: tuple[int, int] | None,
    ) -> None:
        """Count a message that stays native because its dimension has no verdict yet.

        ``between``: global ranks of sender and receiver; None for a collective of ``group``.
        """
        ranks = ranks_of(group) if between is None else between
        self._groups[ranks] = group
        kind = Kind(ranks, between is not None, direction, dtype, numel, codec)
        self.counts[dimension][kind] += 1

    def is_due(self) -> bool:
        """Return whether to plan after this step (1, 2, 4, 8, ...): there may be no messages."""
        self._steps += 1
        return self._steps & (self._steps - 1) == 0

    def forget(self, dimension: Dimension) -> None:
        """Drop the messages of ``dimension``, which has a verdict now."""
        self.counts.pop(dimension, None)

    def plans(self) -> dict[Dimension, SeenMessages]:
        """Plan the messages to time, by dimension that sends any; a collective over the job."""
        own = {name: _heaviest(counts) for name, counts in self.counts.items()}
        said = tell(
            {
                name: {kind.stated: [len(kind.ranks), kind.nbytes] for kind in kinds}
                for name, kinds in own.items()
            },
            what="messages of tp and pp",
        )
        messages: dict[Dimension, SeenMessages] = {}
        for name, kinds in own.items():
            rows = [row[name] for row in said]
            if not any(rows):
                continue
            common = _common(rows)
            mine = sorted((k for k in kinds if k.stated in common), key=lambda kind: kind.stated)
            plan = [self._planned(kind) for kind in mine]
            messages[name] = SeenMessages(plan, max(common.values(), default=0), sorted(common))
        return messages

    def _planned(self, kind: Kind) -> PlannedMessage:
        between = (kind.ranks[0], kind.ranks[1]) if kind.is_send else None
        return PlannedMessage(kind.codec, self._groups[kind.ranks], between, kind.dtype, kind.numel)


def _heaviest(counts: Counter[Kind]) -> list[Kind]:
    """Return for each group (or pair) and direction the kind with the most bytes."""
    best: dict[tuple[Ranks, bool, Direction], tuple[int, str, Kind]] = {}
    for kind, count in counts.items():
        key = (kind.ranks, kind.is_send, kind.direction)
        weight = (count * kind.nbytes, kind.stated, kind)
        if key not in best or weight[:2] > best[key][:2]:
            best[key] = weight
    return [kind for *_, kind in best.values()]


def _common(rows: list[dict[str, list[int]]]) -> dict[str, int]:
    """Return the bytes of each kind that all ranks taking part in it have counted.

    ``rows``: for each rank, ``{Kind.stated: [number of ranks that take part, bytes]}``.
    """
    counts = Counter(stated for row in rows for stated in row)
    every = {stated: figures for row in rows for stated, figures in row.items()}
    return {stated: nbytes for stated, (ranks, nbytes) in every.items() if counts[stated] == ranks}
