"""What the messages of tp and pp look like: known once a step has sent them.

With ``"when": "auto"`` they are native until then. What a group or a pair of stages has in common
is looked at alone: all of its ranks count the same messages and so plan the same trial, which they
compare before they start it, since a rank that waits for a message nobody sends waits for good.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridcomp.autotune.trials import PlannedMessage
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.job.agreement import tell
from hybridcomp.policy import Dimension, Direction


@dataclass(frozen=True)
class Kind:
    """Messages that are equal but for their values."""

    ranks: Ranks  # of the group; sender and receiver of a send
    is_send: bool
    direction: Direction
    dtype: torch.dtype
    numel: int
    codec: Codec

    @property
    def nbytes(self) -> int:
        """Bytes of one message on one rank."""
        return self.numel * self.dtype.itemsize

    @property
    def stated(self) -> str:
        """What all ranks that take part say of it, as text that sorts alike on all of them."""
        how = [self.ranks, self.is_send, self.direction, str(self.dtype), self.numel]
        return json.dumps([*how, self.codec.spec])


class Seen:
    """The messages of dimensions that are not judged yet."""

    def __init__(self, dimensions: Iterable[Dimension]) -> None:
        #: messages by dimension that has no verdict yet
        self.counts: dict[Dimension, Counter[Kind]] = {name: Counter() for name in dimensions}
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self._steps = 0

    @property
    def waiting(self) -> tuple[Dimension, ...]:
        """Dimensions without a verdict."""
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
        """Count a message that stays native because its dimension is not judged yet.

        ``between``: global ranks of sender and receiver, None for a collective of ``group``.
        """
        ranks = ranks_of(group) if between is None else between
        self._groups[ranks] = group
        kind = Kind(ranks, between is not None, direction, dtype, numel, codec)
        self.counts[dimension][kind] += 1

    def is_due(self) -> bool:
        """Whether to look now, after a step: later and later, as there may never be any."""
        self._steps += 1
        return self._steps & (self._steps - 1) == 0

    def forget(self, dimension: Dimension) -> None:
        """It has a verdict."""
        self.counts.pop(dimension, None)

    def plans(self) -> dict[Dimension, tuple[list[PlannedMessage], int]]:
        """What to time and bytes of the largest, by dimension that any rank has seen messages of.

        A collective over the job. 0 bytes: there are messages, but none that its ranks agree on.
        """
        own = {name: _heaviest(counts) for name, counts in self.counts.items()}
        said = tell(
            {
                name: {kind.stated: [len(kind.ranks), kind.nbytes] for kind in kinds}
                for name, kinds in own.items()
            },
            what="messages of tp and pp",
        )
        found: dict[Dimension, tuple[list[PlannedMessage], int]] = {}
        for name, kinds in own.items():
            rows = [row[name] for row in said]
            if not any(rows):
                continue
            common = _common(rows)
            mine = sorted((k for k in kinds if k.stated in common), key=lambda kind: kind.stated)
            plan = [self._planned(kind) for kind in mine]
            found[name] = plan, max(common.values(), default=0)
        return found

    def _planned(self, kind: Kind) -> PlannedMessage:
        between = (kind.ranks[0], kind.ranks[1]) if kind.is_send else None
        return PlannedMessage(kind.codec, self._groups[kind.ranks], between, kind.dtype, kind.numel)


def _heaviest(counts: Counter[Kind]) -> list[Kind]:
    """The kind with the most bytes of each group, or pair, and direction."""
    best: dict[tuple[Ranks, bool, Direction], tuple[int, str, Kind]] = {}
    for kind, count in counts.items():
        key = (kind.ranks, kind.is_send, kind.direction)
        weight = (count * kind.nbytes, kind.stated, kind)
        if key not in best or weight[:2] > best[key][:2]:
            best[key] = weight
    return [kind for *_, kind in best.values()]


def _common(rows: list[dict[str, list[int]]]) -> dict[str, int]:
    """Bytes of what every rank that takes part has stated.

    ``rows``: by rank, by statement, how many ranks take part and the bytes.
    """
    counts = Counter(stated for row in rows for stated in row)
    every = {stated: figures for row in rows for stated, figures in row.items()}
    return {stated: nbytes for stated, (ranks, nbytes) in every.items() if counts[stated] == ranks}
