"""Simulate which parameters ZeRO 3 gathers in a pass, and search for settings that gather least.

DeepSpeed (0.19.8, ``PartitionedParameterCoordinator``) follows a trace of modules:

1. A module's own parameters are gathered before it, whatever the limits say.
2. The trace position moves past the module's entries, unless a prefetch has already passed them.
3. The next entries are prefetched, up to ``min(live - available, prefetch)`` elements, a limit that
   the last of them may exceed.
4. After a module its parameters are released, except those whose later use a prefetch has already
   passed, those that a running module uses, and those used again within ``reuse`` elements.

A transformer's trace is a palindrome, for which keeping the most recently used parameters is
optimal: no eviction policy beats these settings, as the bound ``fewest`` shows.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

#: factor by which gathers may exceed the minimum if the prefetch is longer, which hides their time
SLACK = 1.01
#: settings to try: reuse as fractions of the trace, prefetch as fractions of the model
REUSE = tuple(k / 40 for k in range(41))
PREFETCH = (0.0, 0.0125, 0.025, 0.05, 0.1, 0.2)
#: for traces with more moments than this only every fourth setting of reuse is tried
LONG = 2000


class Knobs(NamedTuple):
    """DeepSpeed's settings of ZeRO 3, in elements, without their prefix ``stage3_``.

    Attributes:
        prefetch: ``prefetch_bucket_size``.
        live: ``max_live_parameters``, which bounds the prefetch alone.
        reuse: ``max_reuse_distance``.
    """

    prefetch: int
    live: int
    reuse: int


class Moves(NamedTuple):
    """Elements gathered, and the most held at once; persistent parameters excluded."""

    gathered: int
    peak: int


class Event(NamedTuple):
    """Beginning (``fetches``) or end of a module, in the forward or the backward pass."""

    module: int
    fetches: bool
    forward: bool


@dataclass(frozen=True)
class Trace:
    """One forward and backward pass, as DeepSpeed records it.

    Attributes:
        events: beginnings and ends of all modules, in order.
        uses: parameters of each module, in DeepSpeed's order.
        sizes: elements of each parameter.
        persistent: parameters that are never released.
        external: parameters that are released only by the optimizer's step.
        leaves: modules that are gathered together with all modules inside them.
        shallow, deep: parameters of each module without and with those of its inner modules; None:
            equal to ``uses``. DeepSpeed looks for later uses at the depth at which the released
            module was gathered.
    """

    events: tuple[Event, ...]
    uses: Sequence[tuple[int, ...]]
    sizes: Sequence[int]
    persistent: frozenset[int] = frozenset()
    external: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()
    shallow: Sequence[tuple[int, ...]] | None = None
    deep: Sequence[tuple[int, ...]] | None = None

    @cached_property
    def order(self) -> list[tuple[int, ...]]:
        """Return the parameters of the modules as they begin: DeepSpeed's trace."""
        return [self.uses[event.module] for event in self.events if event.fetches]

    @property
    def depths(self) -> tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]:
        """Return the parameters of each module for lookups by non-leaf and by leaf modules."""
        return self.shallow or self.uses, self.deep or self.uses

    @cached_property
    def distances(self) -> list[tuple[tuple[int, float], ...]]:
        """Return by event that ends a module: its parameters, with elements to their next use."""
        by_event: list[tuple[tuple[int, float], ...]] = []
        # by depth: position in the trace, counted back from its end, and each parameter's next use
        places = [0, 0]
        later: tuple[dict[int, int], ...] = ({}, {})
        for event in reversed(self.events):
            own, leaf = self.uses[event.module], event.module in self.leaves
            if not event.fetches:
                here, after = places[leaf], later[leaf]
                by_event.append(tuple((p, after.get(p, math.inf) - here) for p in own))
                continue
            by_event.append(())
            for depth, uses in enumerate(self.depths):
                places[depth] -= sum(self.sizes[p] for p in uses[event.module])
                later[depth].update(dict.fromkeys(uses[event.module], places[depth]))
        return by_event[::-1]

    @cached_property
    def queue(self) -> list[tuple[int, int]]:
        """Return the uses of parameters, (parameter, moment), in order."""
        return [(p, moment) for moment, own in enumerate(self.order) for p in own]

    @cached_property
    def stays(self) -> frozenset[int]:
        """Return the parameters that no pass releases."""
        return self.persistent | self.external

    @cached_property
    def moved(self) -> int:
        """Return the elements of the parameters that are used and not persistent."""
        return sum(self.sizes[p] for p in {p for p, _ in self.queue} - self.persistent)


class _Pass:
    """State of DeepSpeed's coordinator within a pass; lists are by parameter.

    Attributes:
        there: whether a parameter is gathered.
        passed: moment of a parameter's last use that was taken from the queue; -1: none.
        running: the running modules that use a parameter.
        backward: modules whose backward pass is running.
    """

    def __init__(self, trace: Trace, knobs: Knobs, there: list[bool]) -> None:
        self.trace, self.knobs, self.there, self._sizes = trace, knobs, there, trace.sizes
        self.available = self.gathered = self.peak = self.moment = self._place = 0
        self.passed = [-1] * len(there)
        self.running: list[set[int]] = [set() for _ in there]
        self.backward: dict[int, None] = {}

    def gather(self, params: Sequence[int]) -> None:
        numel = 0
        for p in params:
            if not self.there[p]:
                self.there[p] = True
                numel += self._sizes[p]
        self.available += numel
        self.gathered += numel
        self.peak = max(self.peak, self.available)

    def fetch(self, event: Event) -> None:
        own, queue = self.trace.uses[event.module], self.trace.queue
        if not event.forward:
            self.backward[event.module] = None
        self.gather(own)
        for p in own:
            self.running[p].add(event.module)
        late = len({p for p in own if self.passed[p] < self.moment})
        popped: set[int] = set()
        while self._place < len(queue) and len(popped) < late:
            p, self.passed[p] = queue[self._place][0], queue[self._place][1]
            popped.add(p)
            self._place += 1
        if self.knobs.prefetch:
            self.prefetch()
        self.moment += 1

    def prefetch(self) -> None:
        budget, queue = min(self.knobs.live - self.available, self.knobs.prefetch), self.trace.queue
        ahead: set[int] = set()
        numel = 0
        while self._place < len(queue) and numel < budget:
            p, moment = queue[self._place]
            self._place += 1
            self.passed[p] = max(self.passed[p], moment)
            if not self.there[p] and p not in ahead:
                ahead.add(p)
                numel += self._sizes[p]
        self.gather([*ahead])

    def release(self, event: Event, distances: tuple[tuple[int, float], ...]) -> None:
        if not event.forward:
            self.backward.pop(event.module, None)
        for p, distance in distances:
            self.running[p].discard(event.module)
            if distance >= self.knobs.reuse and self.passed[p] <= self.moment:
                self.leave(p)

    def leave(self, p: int) -> None:
        if self.there[p] and not self.running[p] and p not in self.trace.stays:
            self.there[p] = False
            self.available -= self._sizes[p]

    def end(self) -> None:
        """Release modules whose backward pass has not reported its end."""
        for module in self.backward:
            for p in self.trace.uses[module]:
                self.running[p].discard(module)
                self.leave(p)


def simulate(
    trace: Trace, knobs: Knobs, passes: int = 1, within: tuple[float, float] = (math.inf, math.inf)
) -> Moves:
    """Simulate the gathers of ``passes`` micro-batches of a step, from an empty device on.

    ``within``: limits of gathered elements and of the peak; the simulation stops when one is
    exceeded, and returns the counts up to there.
    """
    there = [place in trace.persistent for place in range(len(trace.sizes))]
    gathered = peak = 0
    for _ in range(passes):
        state = _Pass(trace, knobs, there)
        for event, distances in zip(trace.events, trace.distances, strict=True):
            if not event.fetches:
                state.release(event, distances)
                continue
            state.fetch(event)
            if gathered + state.gathered > within[0] or state.peak > within[1]:
                return Moves(gathered + state.gathered, state.peak)
        state.end()
        gathered, peak = gathered + state.gathered, max(peak, state.peak)
    return Moves(gathered, peak)


def fewest(trace: Trace, limit: int) -> int | None:
    """Return a lower bound on gathered elements in a pass; None: a module is too large.

    The bound is Belady's: parameters whose next use is furthest are evicted first, the last of them
    only in part, so that unequal sizes cost nothing. ``limit``: most elements held at once, without
    persistent parameters.
    """
    held: dict[int, int] = {}
    total = filled = 0
    following: dict[int, int] = {}
    for every, after in zip(trace.order, _following(trace.order), strict=True):
        own = [p for p in every if p not in trace.persistent]
        needed = {p: trace.sizes[p] - held.get(p, 0) for p in own}
        excess = filled + sum(needed.values()) - limit
        others = sorted(held.keys() - needed.keys(), key=following.__getitem__, reverse=True)
        for p in others:
            gone = min(held[p], max(0, excess))
            held[p], excess, filled = held[p] - gone, excess - gone, filled - gone
        if excess > 0:
            return None
        filled += sum(needed.values())
        total += sum(needed.values())
        held.update({p: trace.sizes[p] for p in own})
        following |= after
    return total


def _following(order: Sequence[tuple[int, ...]]) -> list[dict[int, int]]:
    """Return by moment ``{parameter: moment of its next use}``; ``len(order)`` if there is none."""
    later: dict[int, int] = {}
    uses = []
    for moment in reversed(range(len(order))):
        uses.append({p: later.get(p, len(order)) for p in order[moment]})
        later.update(dict.fromkeys(order[moment], moment))
    return uses[::-1]


class GatherChoice(NamedTuple):
    """Settings that a search has chosen, and the elements that a step then gathers."""

    knobs: Knobs
    moves: Moves


def choose(trace: Trace, limit: int, passes: int = 1) -> GatherChoice | None:
    """Return the settings that gather least within ``limit`` elements; None if none fit.

    Among settings within ``SLACK`` of the fewest it takes the one with the longest prefetch.
    """
    choices: list[GatherChoice] = []
    least: float = math.inf
    for knobs in _settings(trace, limit):
        moves = simulate(trace, knobs, passes, (SLACK * least, limit))
        if moves.peak <= limit and moves.gathered <= SLACK * least:
            choices.append(GatherChoice(knobs, moves))
            least = min(least, moves.gathered)
    near = [choice for choice in choices if choice.moves.gathered <= SLACK * least]

    def rank(choice: GatherChoice) -> tuple[int, ...]:
        (prefetch, live, reuse), (gathered, peak) = choice
        return prefetch, -gathered, -peak, live, -reuse

    return max(near, key=rank, default=None)


def _settings(trace: Trace, limit: int) -> Iterator[Knobs]:
    """Yield settings to try, those that keep most first.

    Reuse distances lie on a grid, which is finer around the largest that fits without prefetch.
    Grid points with no distance of a use between them act alike: one of them is yielded.
    """
    known = sorted({distance for row in trace.distances for _, distance in row} - {math.inf})
    step, begun = 4 if len(trace.order) > LONG else 1, [e.module for e in trace.events if e.fetches]
    whole = max(sum(trace.sizes[p] for m in begun for p in uses[m]) for uses in trace.depths)
    reuses = {int(share * whole) + 1 for share in REUSE[::step]} | {0}
    low, high = 0, whole + 1  # bisect for the longest reuse distance that fits without a prefetch
    while high - low > max(1, whole // 4096):
        middle = (low + high) // 2
        if simulate(trace, Knobs(0, limit, middle), 1, (math.inf, limit)).peak <= limit:
            low = middle
        else:
            high = middle
    reuses |= {low, max(0, low - limit // 16), max(0, low - limit // 8)}
    # a prefetch takes more room, not less
    alike = {bisect.bisect_left(known, longest): longest for longest in sorted(reuses, reverse=True)
             if longest <= low}  # fmt: skip
    for prefetch in dict.fromkeys(int(share * trace.moved) for share in PREFETCH):
        for live in (limit, limit * 3 // 4) if prefetch else (limit,):
            yield from (Knobs(prefetch, live, reuse) for reuse in alike.values())
