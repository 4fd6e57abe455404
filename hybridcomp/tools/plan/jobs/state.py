"""Jobs and ranks at one moment: where each job would run, and when jobs are expected to end."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hybridcomp.tools.plan.machines.cluster import Cluster

#: number of ranks of each running job
Allocation = Mapping[str, int]
#: the ranks of each job
Places = dict[str, tuple[int, ...]]
#: fraction of the cluster that a waiting job is expected to get once ranks are free
LATER = 0.25


@dataclass(frozen=True)
class Shape:
    """The ranks of each node; all nodes have equally many."""

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Shape:
        """Return the shape of ``cluster``, whose nodes have to be of one size (``is_even``)."""
        found: dict[int, list[int]] = {}
        for number, rank in enumerate(cluster.ranks):
            found.setdefault(rank.node, []).append(number)
        return cls(tuple(map(tuple, found.values())))

    @property
    def is_even(self) -> bool:
        """Return whether all nodes have equally many ranks."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def of_node(self) -> int:
        """Return the number of ranks of a node."""
        return len(self.nodes[0])

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the cluster."""
        return sum(map(len, self.nodes))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks that jobs may get; each but the last divides the next.

        Parts of a node, then 1, 2, 4, ... whole nodes and all. Since each part divides the next
        larger one, jobs that are placed by size leave no gaps.
        """
        found = [self.of_node]
        while found[-1] > 1:
            size = found[-1]
            found.append(size // next(part for part in range(2, size + 1) if size % part == 0))
        count = len(self.nodes)
        whole = {1 << power for power in range(count.bit_length())} | {count}
        return tuple(sorted({*found, *(self.of_node * nodes for nodes in whole)}))


@dataclass(frozen=True)
class JobRates:
    """A job as the search sees it.

    rates: samples a second, by each number of ranks that the job can have.
    total: samples left when the job arrived. asked: ranks that first in, first out gives it.
    is_fixed: the job runs, and cannot resume on other ranks.
    """

    name: str
    rates: Mapping[int, float]
    total: float
    asked: int
    arrival: float = 0.0
    priority: float = 1.0
    is_fixed: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks, ascending."""
        return tuple(sorted(self.rates))


@dataclass(frozen=True)
class ClusterState:
    """The jobs that are known at a moment.

    left: samples that each job has left. running: the ranks of each running job. begun: jobs that
    have trained already: on other ranks they have to resume, which takes ``pause`` seconds.
    """

    shape: Shape
    tasks: Mapping[str, JobRates]
    left: Mapping[str, float]
    running: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    pause: float = 0.0

    def seconds(self, name: str, ranks: int) -> float:
        """Return the seconds that a job needs to its end on ``ranks`` ranks, without a pause."""
        return self.left[name] / self.tasks[name].rates[ranks]

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Return the number of ranks of each job that cannot change its ranks."""
        return {name: len(self.running[name]) for name, one in self.tasks.items() if one.is_fixed}

    @cached_property
    def _leaves_no_gaps(self) -> bool:
        every = {size for task in self.tasks.values() for size in task.sizes}
        return not self.fixed and every <= set(self.shape.sizes)

    def fits(self, allocation: Allocation) -> bool:
        """Return whether all jobs of ``allocation`` can be placed."""
        if sum(allocation.values()) > self.shape.world_size:
            return False
        return self._leaves_no_gaps or self.place(allocation) is not None

    def place(self, allocation: Allocation) -> Places | None:
        """Assign ranks to each job (ONES' reorder); return None if the jobs do not fit.

        Jobs whose number of ranks does not change keep their ranks. If the other jobs do not fit
        then, all jobs but the fixed ones are placed anew: the largest first, on as few nodes as
        possible, preferably on the nodes on which they run now.
        """
        kept = {name: ranks for name, ranks in self.running.items()
                if allocation.get(name) == len(ranks)}  # fmt: skip
        found = self._seated(allocation, kept)
        return found or self._seated(allocation, {name: kept[name] for name in self.fixed})

    def _seated(self, allocation: Allocation, kept: Places) -> Places | None:
        taken = {rank for ranks in kept.values() for rank in ranks}
        free = [[rank for rank in node if rank not in taken] for node in self.shape.nodes]
        found = dict(kept)
        others = [name for name in allocation if name not in kept]

        def turn(name: str) -> tuple[int, bool, str]:
            """Order by size; among equal sizes, jobs that can stay come first."""
            own = self.running.get(name)
            return -allocation[name], own is None or not taken.isdisjoint(own), name

        while others:
            name = min(others, key=turn)
            others.remove(name)
            own = self.running.get(name, ())
            ranks = _take(free, allocation[name], self.shape.of_node, own, self._disturbed)
            if ranks is None:
                return None
            found[name] = ranks
            taken.update(ranks)
        return found

    @cached_property
    def _disturbed(self) -> list[int]:
        """Return, for each node, how many of its ranks run jobs now."""
        busy = {rank for ranks in self.running.values() for rank in ranks}
        return [len(busy.intersection(node)) for node in self.shape.nodes]

    def expected(self, allocation: Allocation) -> float:
        """Return the mean seconds until the known jobs end, weighted by priority.

        Jobs of ``allocation`` run from now to their ends; waiting jobs start as ranks become free,
        in order of seconds over priority; no other job arrives. A job that resumes on other ranks
        pays the pause. Returns infinity where the jobs do not fit.
        """
        places = self.place(allocation)
        if places is None:
            return float("inf")
        heap, total = [], 0.0
        for name, ranks in places.items():
            pays = name in self.begun and self.running.get(name) != ranks
            end = self.seconds(name, len(ranks)) + (self.pause if pays else 0.0)
            total += self.tasks[name].priority * end
            heap.append((end, len(ranks)))
        heapq.heapify(heap)
        free, now = self.shape.world_size - sum(allocation.values()), 0.0
        for seconds, size, priority in self._later(allocation):
            while free < size:
                now, freed = heapq.heappop(heap)
                free += freed
            free -= size
            heapq.heappush(heap, (now + seconds, size))
            total += priority * (now + seconds)
        weights = sum(task.priority for task in self.tasks.values())
        return total / weights if weights else 0.0

    def _later(self, allocation: Allocation) -> list[tuple[float, int, float]]:
        """Return seconds, ranks and priority of the jobs that wait, in the order they start."""
        found = []
        for name, task in self.tasks.items():
            if name in allocation:
                continue
            sizes = [size for size in task.sizes if size <= LATER * self.shape.world_size]
            seconds, ranks = min((self.seconds(name, one), one) for one in sizes or task.sizes)
            pause = self.pause if name in self.begun else 0.0
            found.append((seconds + pause, ranks, task.priority))
        return sorted(found, key=lambda one: (one[0] / one[2], one[1]))


def _take(
    free: list[list[int]], size: int, of_node: int, own: Iterable[int], disturbed: list[int]
) -> tuple[int, ...] | None:
    """Take ``size`` ranks out of ``free`` (by node); return None, changing nothing, if none fit.

    Whole nodes: first those with most of the job's own ranks, then those with the fewest busy ones.
    Part of a node: from the node with most of the job's own ranks, then from the fullest node.
    """
    own = set(own)
    whole = size // of_node if size % of_node == 0 else 1
    need = min(size, of_node)
    able = [node for node, ranks in enumerate(free) if len(ranks) >= need]
    if len(able) < whole or (size % of_node and size > of_node):
        return None
    mine = {node: len(own.intersection(free[node])) for node in able}
    load = disturbed if size >= of_node else [len(ranks) for ranks in free]
    chosen = sorted(able, key=lambda node: (-mine[node], load[node], node))[:whole]
    found: list[int] = []
    for node in chosen:
        ranks = sorted(free[node], key=lambda rank: (rank not in own, rank))[:need]
        free[node] = [rank for rank in free[node] if rank not in ranks]
        found += ranks
    return tuple(sorted(found))
