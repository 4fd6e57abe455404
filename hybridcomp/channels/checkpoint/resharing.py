"""Give residuals saved by another number of ranks to the ranks that encode the values now.

For each parameter their sum over the job must be kept: it is the part of the gradients not yet
sent. New rank ``i % world_size`` reads old rank i's state, so each is read once. Then one
all-reduce, in pieces of ``PIECE`` values, adds up the residuals of all ranks, and each summed value
goes to one of the ranks that encode it: each of n senders of a slice keeps an n-th of it. No rank
ever holds more than the states it has read and its own part, and no value is held twice.

In two levels the ranks of a node encode a sum together, so they count as one sender and hold its
part in common (``error_feedback.NodeStretch``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.residuals.error_feedback import Residuals
from hybridcomp.collectives.topology import Nodes, Ranks
from hybridcomp.errors import CheckpointError
from hybridcomp.job import small_messages
from hybridcomp.job.agreement import tell
from hybridcomp.log import say

Range = tuple[int, int]
#: offset of a slice in its parameter, and its fp32 values
Held = tuple[int, Tensor]
WHAT = "residuals of another number of ranks"
#: values that are summed per message: 16 MB
PIECE = 1 << 22
#: maximum names listed in an error message
SHOWN = 4


@dataclass(frozen=True)
class Sends:
    """Ranges of a parameter's values that this rank encodes, and the group it sends them to.

    ``ranks``: global ranks of the group; None: all ranks that encode a parameter of this name.
    """

    ranges: tuple[Range, ...]
    ranks: Ranks | None = None


@dataclass
class ReadResiduals:
    """Slices of old residuals that this rank has read, by parameter, in today's units."""

    stretches: dict[str, list[Held]] = field(default_factory=dict)

    def add(self, name: str, stretch: Held, factor: float = 1.0) -> None:
        """Add ``factor`` times a slice; takes over and modifies its tensor."""
        offset, values = stretch
        values = values.mul_(factor) if factor != 1.0 else values
        stored = self.stretches.setdefault(name, [])
        for start, other in stored:
            if start == offset and other.shape == values.shape:
                other.add_(values)
                return
        stored.append((offset, values))

    def ends(self) -> dict[str, int]:
        """Return where the last slice of each parameter ends."""
        return {
            name: max(offset + values.numel() for offset, values in stored)
            for name, stored in self.stretches.items()
        }


def share(old: int) -> range:
    """Return the ranks of a job of ``old`` ranks whose states this rank reads."""
    return range(dist.get_rank(), old, dist.get_world_size())


#: name, range, and the ranks that encode it together: a single rank, or all ranks of a node
Segment = tuple[str, Range, Ranks]


@dataclass(frozen=True)
class ResidualPlan:
    """Segments of the residuals that the ranks have read, with the ranks that get each of them."""

    segments: list[Segment]
    unknown: list[str]  # names of parameters that no rank encodes

    def move(self, part: ReadResiduals, residuals: Residuals, device: torch.device) -> None:
        """Sum ``part`` over all ranks and give each value to a rank that sends it; a collective.

        Empties ``part``. ``device``: where the default group reduces.
        """
        if self.unknown:
            names = ", ".join(self.unknown[:SHOWN])
            more = f" and {len(self.unknown) - SHOWN} more" if len(self.unknown) > SHOWN else ""
            say(f"residuals that no parameter of this job takes start at zero: {names}{more}")
        me = dist.get_rank()
        for batch in _batches(self.segments):
            numels = [high - low for _, (low, high), _ in batch]
            flat = torch.zeros(sum(numels), dtype=torch.float32, device="cpu")
            for (name, edges, _), view in zip(batch, torch.split(flat, numels), strict=True):
                _put(part, name, edges, view)
            total = flat.to(device)
            small_messages.total(total)
            sums = torch.split(total.cpu(), numels)
            for (name, (low, _), unit), values in zip(batch, sums, strict=True):
                if me in unit:
                    residuals.add(name, (low, values.clone()), unit.index(me), len(unit))
        part.stretches.clear()


def plan(
    part: ReadResiduals, sends: Mapping[str, Sends] | None, nodes: Nodes | None, padding: int
) -> ResidualPlan:
    """Decide which rank gets each slice that the ranks have read; a collective through the store.

    Args:
        part: residuals that this rank has read.
        sends: ranges that this rank encodes, by name; None: all that were read.
        nodes: nodes of the job if groups have two levels.
        padding: number of padding values that may have been encoded behind the end of a parameter.

    Raises CheckpointError on every rank if a slice extends beyond its parameter.
    """
    whole: dict[str, int] = {}
    for statement in _tell_once({"ends": part.ends()}):
        for name, end in statement["ends"].items():
            whole[name] = max(end, whole.get(name, 0))
    own = None if sends is None else {name: (s.ranges, s.ranks) for name, s in sends.items()}
    stated = [statement["sends"] for statement in _tell_once({"sends": own})]
    rows = _Rows(nodes)
    segments: list[Segment] = []
    unknown = []
    for name, end in sorted(whole.items()):
        senders = _senders(name, end, stated, rows)
        length = max((high for ranges, _ in senders for _, high in ranges), default=0)
        if not senders:
            unknown.append(name)
        elif end > length + padding:
            raise CheckpointError(
                f"{WHAT}: {name!r} has {length} values, and residuals up to value {end}: the "
                "checkpoint is damaged or of another model"
            )
        for (low, high), units in _sweep(senders):
            segments += _stripes(name, (low, min(high, end)), units)
    return ResidualPlan(segments, unknown)


def _tell_once(statement: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange statements like ``tell``, but send each distinct statement only once."""
    text = json.dumps(statement, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = [one["digest"] for one in tell({"digest": digest}, what=WHAT)]
    is_first = digests.index(digest) == dist.get_rank()
    said = tell({"text": text if is_first else None}, what=WHAT)
    read = {one: json.loads(said[digests.index(one)]["text"]) for one in set(digests)}
    return [read[one] for one in digests]


class _Rows:
    """Cache of the ranks of each group that encode together."""

    def __init__(self, nodes: Nodes | None) -> None:
        self._nodes = nodes
        self._known: dict[Ranks, dict[int, Ranks]] = {}

    def of(self, rank: int, group: Ranks) -> Ranks:
        """Return the ranks of ``group`` that encode together with ``rank``."""
        if self._nodes is None:
            return (rank,)
        if group not in self._known:
            found = self._nodes.rows(group)
            self._known[group] = {rank: row for row in found for rank in row}
        return self._known[group].get(rank, (rank,))


def _senders(
    name: str, end: int, stated: Sequence[dict[str, Any] | None], rows: _Rows
) -> list[tuple[tuple[Range, ...], Ranks]]:
    """Return the ranges of ``name``, each with the ranks that encode them together."""
    holders = tuple(rank for rank, sends in enumerate(stated) if sends is None or name in sends)
    found: dict[Ranks, tuple[Range, ...]] = {}
    for rank in holders:
        sends = stated[rank]
        ranges, ranks = ([[0, end]], None) if sends is None else sends[name]
        unit = rows.of(rank, holders if ranks is None else tuple(ranks))
        found[unit] = tuple((low, high) for low, high in ranges)
    return [(ranges, unit) for unit, ranges in found.items()]


def _sweep(
    senders: Iterable[tuple[tuple[Range, ...], Ranks]],
) -> Iterator[tuple[Range, list[Ranks]]]:
    """Yield slices in ascending order, each with its units: ranks that encode it together."""
    events: dict[int, tuple[set[Ranks], set[Ranks]]] = {}
    for ranges, unit in senders:
        for low, high in ranges:
            if low < high:
                events.setdefault(low, (set(), set()))[0].add(unit)
                events.setdefault(high, (set(), set()))[1].add(unit)
    active: set[Ranks] = set()
    before = 0
    for place in sorted(events):
        if active:
            yield (before, place), sorted(active)
        begins, ends = events[place]
        active = (active - ends) | begins
        before = place


def _stripes(name: str, edges: Range, units: Sequence[Ranks]) -> Iterator[Segment]:
    """Yield an equal part of the range ``edges`` for each of ``units``, leaving out empty parts."""
    start, numel = edges[0], edges[1] - edges[0]
    for index, unit in enumerate(units):
        low, high = (start + numel * i // len(units) for i in (index, index + 1))
        if low < high:
            yield name, (low, high), unit


def _batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Cut and group segments into batches of at most PIECE values."""
    batch: list[Segment] = []
    free = PIECE
    for name, (low, high), unit in segments:
        while low < high:
            stop = min(high, low + free)
            batch.append((name, (low, stop), unit))
            free -= stop - low
            low = stop
            if not free:
                yield batch
                batch, free = [], PIECE
    if batch:
        yield batch


def _put(part: ReadResiduals, name: str, edges: Range, view: Tensor) -> None:
    """Add the residuals read for the range ``edges`` to ``view``, and free slices that end in it.

    Segments of a name come in ascending order.
    """
    left: list[Held] = []
    for offset, values in part.stretches.pop(name, ()):
        low, high = max(edges[0], offset), min(edges[1], offset + values.numel())
        if low < high:
            view[low - edges[0] : high - edges[0]] += values[low - offset : high - offset]
        if offset + values.numel() > edges[1]:
            left.append((offset, values))
    if left:
        part.stretches[name] = left
