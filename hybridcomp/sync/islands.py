"""Split a job into islands, and make the process groups inside and between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from hybridcomp.collectives.topology import Ranks, discover
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import peer_liveness

KEY = "compression.sync.islands"


@dataclass(frozen=True, eq=False)
class Islands:
    """The islands of a job, and the position of this rank.

    Attributes:
        rows: global ranks of each island, equally many.
        index: number of this rank's island, its position in ``rows``.
        place: index of this rank in its island.
        inside: process group of the island.
        peers: process group of the ranks with this rank's ``place``, one per island, in order.
    """

    rows: tuple[Ranks, ...]
    index: int
    place: int
    inside: dist.ProcessGroup
    peers: dist.ProcessGroup

    @property
    def width(self) -> int:
        """Return the number of ranks of an island."""
        return len(self.rows[0])

    @property
    def ranks(self) -> Ranks:
        """Return the global ranks of this rank's island."""
        return self.rows[self.index]


#: ``rows`` -> islands made while ``_made_in`` was the default group
_made: dict[tuple[Ranks, ...], Islands] = {}
_made_in: list[Callable[[], dist.ProcessGroup | None]] = [lambda: None]


def islands_of(size: int | str) -> Islands:
    """Return the islands of this job; a collective of all ranks at the first call.

    ``size``: number of consecutive ranks of an island, or "node". Engines of one process share the
    groups, which end with torch.distributed. Raises ConfigError if islands cannot be equally large,
    or if there is only one.
    """
    world = dist.group.WORLD
    if world is None:
        todo = "torch.distributed is not up; call init_process_group before"
        raise ConfigError(KEY, size, todo)
    if not isinstance(size, str):
        check_size(size, dist.get_world_size())
    nodes = discover("auto" if isinstance(size, str) else size).of_rank
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    rows = tuple(tuple(row) for row in found.values())
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        told = Shown(f"islands of {' and '.join(map(str, lengths))} ranks")
        raise ConfigError(KEY, told, "each rank needs a peer in every island: use equally many")
    if len(rows) < 2:
        if size == "node" and lengths[0] > 1:
            why = "all ranks are on one node, as far as the launcher says"
            half = next(n for n in range(lengths[0] // 2, 0, -1) if lengths[0] % n == 0)
            todo = f'to try islands here write "islands": {half}, the ranks of each'
            raise ConfigError(KEY, size, f"{why}, so that one island has nobody to meet; {todo}")
        raise _alone(lengths[0])
    if _made_in[0]() is not world:  # torch.distributed was restarted
        _made.clear()
        _made_in[0] = weakref.ref(world)
    if rows not in _made:
        _made[rows] = _make(rows)
    return _made[rows]


def is_island(ranks: Ranks) -> bool:
    """Return whether these global ranks form one of this job's islands."""
    return _made_in[0]() is dist.group.WORLD and any(ranks in rows for rows in _made)


def check_size(size: int, ranks: int) -> None:
    """Raise ConfigError if ``ranks`` ranks cannot be split into islands of ``size`` ranks."""
    if ranks % size:
        raise ConfigError(KEY, size, f"the job has {ranks} ranks, no multiple of it")
    if ranks == size:
        raise _alone(size)


def check_outlier(above: float | None, islands: int) -> None:
    """Raise ConfigError if ``outlier`` is set for too few islands to have a median."""
    if above is not None and islands < 3:
        todo = f"of {islands} islands either could be the outlier; have three or more, or remove it"
        raise ConfigError("compression.sync.outlier", above, todo)


def _alone(ranks: int) -> ConfigError:
    told = Shown(f"one island of {ranks} rank(s)")
    return ConfigError(KEY, told, "it has nobody to meet; write a smaller number of ranks")


def _make(rows: tuple[Ranks, ...]) -> Islands:
    """Make all groups, on all ranks in the same order."""
    limit = peer_liveness.time_limit()
    me = dist.get_rank()
    inside = [dist.new_group(list(row), timeout=limit) for row in rows]
    columns = list(zip(*rows, strict=True))
    between = [dist.new_group(list(column), timeout=limit) for column in columns]
    index = next(number for number, row in enumerate(rows) if me in row)
    place = rows[index].index(me)
    own, peers = inside[index], between[place]
    assert own is not None and peers is not None, "a member"
    return Islands(rows, index, place, own, peers)
