"""The ranks that measure; they agree on every figure, so that all of them time the same cases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.collectives.topology import Nodes
from hybridcomp.errors import ConfigError
from hybridcomp.job import small_messages
from hybridcomp.job.member_groups import new_member_group
from hybridcomp.log import say
from hybridcomp.tools.progress import left_of

Ranks = tuple[int, ...]
#: seconds after which an unfinished part reports its progress
TELL_S = 15.0
#: most group shapes to measure in addition to pairs; the ring model predicts the others
MOST_SHAPES = 6


@dataclass(frozen=True)
class Team:
    """All ranks of the job: this rank's device, and the nodes of all ranks."""

    device: torch.device
    nodes: Nodes

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return dist.get_world_size()

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over all ranks; a collective, and so a barrier, too."""
        found = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            small_messages.most(found)
        return [float(value) for value in found.tolist()]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.most([0.0])

    def gather(self, own: Any) -> list[Any]:
        """Gather ``own`` of every rank, by rank, on all ranks; a collective."""
        return [own] if self.world_size == 1 else small_messages.gather_objects(own)


@dataclass(frozen=True)
class GroupShape:
    """Groups of one size that span equally many nodes, and this rank's process group among them."""

    ranks: int
    nodes: int
    groups: tuple[Ranks, ...]
    own: Ranks = ()
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Return whether this rank is in the first group, which is timed alone."""
        return self.own == self.groups[0]

    def describe(self) -> str:
        """Describe the shape in words."""
        place = "inside a node" if self.nodes == 1 else f"on {self.nodes} nodes"
        return f"{self.ranks} ranks {place}"


def sites_of(nodes: Nodes) -> tuple[int, ...]:
    """Return the site (or switch) of every rank, the largest known units; empty in two levels.

    Raises ConfigError if sites have different numbers of nodes, or their nodes are not consecutive.
    """
    if len(nodes.units) < 2:
        return ()
    sites = nodes.units[-1]
    each = len(set(nodes.of_rank)) // len(set(sites))
    if any(node // each != site for node, site in zip(nodes.of_rank, sites, strict=True)):
        todo = "sites must have equally many nodes, numbered one after the other"
        raise ConfigError("--nodes-per-site", list(sites), f"{todo}; start ranks in that order")
    return sites


def uplink_shape(sites: Sequence[int]) -> GroupShape:
    """Return pairs of ranks on neighbouring sites, each with the same index in its site.

    ``sites``: the site of every rank.
    """
    return GroupShape(2, 2, tuple(_pairs(sites, across=True)))


def shapes_of(
    nodes: Sequence[int], most: int = MOST_SHAPES, sites: Sequence[int] = ()
) -> list[GroupShape]:
    """Return the shapes that tensor, pipeline and data parallelism of these ranks can have.

    ``nodes``, ``sites``: node and site of every rank; with sites, both ranks of a pair are in one
    site. Pairs inside a node and between nodes come first, then the whole job, then groups whose
    size divides the job's, of neighbours and of ranks far apart, up to ``most`` shapes besides the
    pairs.
    """
    world = len(nodes)
    found: dict[tuple[int, int], GroupShape] = {}
    candidates = [_pairs(nodes, across=False), _pairs(nodes, across=True, sites=sites)]
    sizes = [world, *(size for size in range(2, world) if world % size == 0)]
    for size in sorted(sizes, key=lambda size: (size != world, size)):
        strides = [
            stride for stride in range(1, world // size + 1) if (world // size) % stride == 0
        ]
        candidates += [_strided(world, size, stride) for stride in strides]
    for groups in candidates:
        spans = {len({nodes[rank] for rank in group}) for group in groups}
        if len(spans) == 1:
            shape = GroupShape(len(groups[0]), spans.pop(), tuple(groups))
            found.setdefault((shape.ranks, shape.nodes), shape)
    pairs = [shape for shape in found.values() if shape.ranks == 2]
    return pairs + [shape for shape in found.values() if shape.ranks > 2][:most]


def _pairs(nodes: Sequence[int], *, across: bool, sites: Sequence[int] = ()) -> list[Ranks]:
    """Return disjoint pairs of ranks, on one node or at equal places of neighbouring nodes.

    With ``sites``, both ranks of a pair are in one site.
    """
    rows: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        rows.setdefault(node, []).append(rank)
    if across:
        by_site: dict[int, list[list[int]]] = {}
        for row in rows.values():
            by_site.setdefault(sites[row[0]] if sites else 0, []).append(row)
        return [
            pair for rooms in by_site.values()
            for one, two in zip(rooms[::2], rooms[1::2], strict=False)
            for pair in zip(one, two, strict=False)
        ]  # fmt: skip
    return [
        pair for row in rows.values() for pair in zip(row[::2], row[1::2], strict=False)
    ]  # fmt: skip


def _strided(world: int, size: int, stride: int) -> list[Ranks]:
    """Split all ranks into groups of ``size`` ranks that are ``stride`` apart."""
    block = size * stride
    return [
        tuple(range(start + offset, start + block, stride))
        for start in range(0, world, block)
        for offset in range(stride)
    ]


def connected(shapes: Sequence[GroupShape], team: Team) -> list[GroupShape]:
    """Return the shapes, each with this rank's process group; a collective over each of them.

    A rank creates only the groups that it is in: all groups of a large job would take minutes.
    """
    found = []
    for shape in shapes:
        own = next((ranks for ranks in shape.groups if team.rank in ranks), ())
        group = dist.group.WORLD
        if len(own) != team.world_size:
            group = new_member_group(own) if own else None
        found.append(GroupShape(shape.ranks, shape.nodes, shape.groups, own, group))
    return found


class TimeBudget:
    """Seconds that a measurement may take, the same on all ranks; prints the start of each part."""

    def __init__(self, seconds: float, team: Team) -> None:
        self.seconds, self.team = seconds, team
        self._start = time.monotonic()

    def spent(self) -> float:
        """Return the seconds since the start, of the slowest rank; a collective."""
        return self.team.most([time.monotonic() - self._start])[0]

    def place(self, spent: float) -> str:
        """Format the seconds spent and left."""
        left = max(0.0, self.seconds - spent)
        return f"{spent:5.1f} s of {self.seconds:g}, {left_of(left)}"

    def part(self, until: float, told: str) -> MeasuredPart:
        """Start a part that may last until the share ``until`` of all seconds; a collective."""
        spent = self.spent()
        say(f"{self.place(spent)}: {told}")
        return MeasuredPart(self, max(0.0, until * self.seconds - spent) + spent, told)


class MeasuredPart:
    """One section of the measurement; its cases share the section's time budget."""

    def __init__(self, budget: TimeBudget, stop: float, name: str) -> None:
        self._budget, self._stop, self._name = budget, stop, name
        self._told = time.monotonic()

    @property
    def whole_s(self) -> float:
        """Return the seconds of the whole measurement."""
        return self._budget.seconds

    def allowances(self, count: int) -> Iterator[float]:
        """Yield the seconds for each of ``count`` cases, at least 0; a collective per case."""
        for left in range(count, 0, -1):
            yield self.each(left)

    def each(self, left: int) -> float:
        """Return the seconds of the next of ``left`` cases; a collective.

        Prints now and then how many are left.
        """
        spent = self._budget.spent()
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            say(f"{self._budget.place(spent)}: {self._name}: {left} to do")
        return max(0.0, self._stop - spent) / max(1, left)
