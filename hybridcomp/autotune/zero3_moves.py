"""Simulate which parameters ZeRO 3 gathers in a pass, and search for settings that gather least.

DeepSpeed (0.19.8, ``PartitionedParameterCoordinator``) follows a trace of modules:

1. A module's own parameters are gathered before it, whatever the limits say.
2. The trace position moves past the module's entries, unless a prefetch has already passed them.
3. The next entries are prefetched, up to ``min(live - available, prefetch)`` elements, a limit that
   the last of them may exceed.
4. After a module its parameters are released, except those for a later use that a prefetch has
   passed, those that a running module uses, and those used again within ``reuse`` elements.

A transformer's trace is a palindrome, for which keeping the most recently used parameters is
optimal: no eviction policy beats these settings, as the bound ``fewest`` shows.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

#: factor by which a longer prefetch may exceed the fewest gathers, since it hides their time
SLACK = 1.01
#: settings of reuse and prefetch to try, as shares of the trace and of the model
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
    """Elements gathered in a pass, and the peak; persistent parameters excluded."""

    gathered: int
    peak: int


class Event(NamedTuple):
    """Beginning (``fetches``) or end of a module, in the forward or the backward pass."""

    module: int
    fetches: bool
    forward: bool


@dataclass(frozen=True)
class _Walk:
    """The parameters of the modules in the order in which these begin.

    before: elements of the trace before each moment, and in total; moments: of each parameter's
    uses.
    """

    before: list[int]
    moments: dict[int, list[int]]

    @classmethod
    def of(cls, order: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> _Walk:
        moments: dict[int, list[int]] = {}
        for moment, own in enumerate(order):
            for p in own:
                moments.setdefault(p, []).append(moment)
        return cls([0, *itertools.accumulate(sum(sizes[p] for p in own) for own in order)], moments)

    def next_use(self, p: int, moment: int) -> int | None:
        """Return the first use of ``p`` from ``moment`` on."""
        uses = self.moments.get(p, [])
        place = bisect.bisect_left(uses, moment)
        return uses[place] if place < len(uses) else None


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
        shallow, deep: parameters of each module without and with inner modules; None: as ``uses``.
            DeepSpeed looks for later uses at the depth at which the released module was gathered.
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

    @cached_property
    def walk(self) -> _Walk:
        """Return the pass in the order in which its parameters are gathered."""
        return _Walk.of(self.order, self.sizes)

    @cached_property
    def walks(self) -> tuple[_Walk, _Walk]:
        """Return the parameters that non-leaf and leaf modules search for later uses."""
        found = []
        for uses in (self.shallow or self.uses, self.deep or self.uses):
            order = [uses[event.module] for event in self.events if event.fetches]
            found.append(_Walk.of(order, self.sizes))
        return found[0], found[1]

    @cached_property
    def moved(self) -> int:
        """Return the elements of the parameters that are used and not persistent."""
        return sum(self.sizes[p] for p in self.walk.moments if p not in self.persistent)


@dataclass
class _Pass:
    """State of DeepSpeed's coordinator within a pass."""

    trace: Trace
    knobs: Knobs
    there: set[int]
    available: int = 0
    gathered: int = 0
    peak: int = 0
    moment: int = 0
    # last use returned by the queue, by parameter
    passed: dict[int, int] = field(default_factory=dict)
    running: dict[int, set[int]] = field(default_factory=dict)  # running modules, by parameter
    # modules whose backward pass is running
    backward: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = enumerate(self.trace.order)
        self.queue = deque((p, moment) for moment, own in order for p in own)

    def gather(self, params: Sequence[int] | set[int]) -> None:
        numel = sum(self.trace.sizes[p] for p in set(params) - self.there)
        self.there.update(params)
        self.available += numel
        self.gathered += numel
        self.peak = max(self.peak, self.available)

    def fetch(self, event: Event) -> None:
        own = self.trace.uses[event.module]
        if not event.forward:
            self.backward[event.module] = None
        self.gather(own)
        for p in own:
            self.running.setdefault(p, set()).add(event.module)
        late = {p for p in own if self.passed.get(p, -1) < self.moment}
        found: set[int] = set()
        while self.queue and len(found) < len(late):
            p, self.passed[p] = self.queue[0][0], self.queue[0][1]
            found.add(p)
            self.queue.popleft()
        self.prefetch()
        self.moment += 1

    def prefetch(self) -> None:
        budget = min(self.knobs.live - self.available, self.knobs.prefetch)
        ahead: set[int] = set()
        numel = 0
        while self.knobs.prefetch and self.queue and numel < budget:
            p, moment = self.queue.popleft()
            self.passed[p] = max(self.passed.get(p, -1), moment)
            if p not in self.there and p not in ahead:
                ahead.add(p)
                numel += self.trace.sizes[p]
        self.gather(ahead)

    def release(self, event: Event) -> None:
        trace, own = self.trace, self.trace.uses[event.module]
        walk = trace.walks[event.module in trace.leaves]
        if not event.forward:
            self.backward.pop(event.module, None)
        for p in own:
            self.running.get(p, set()).discard(event.module)
            following, start = walk.next_use(p, self.moment), walk.before[self.moment]
            reused = following is not None and walk.before[following] - start < self.knobs.reuse
            if not reused and self.passed.get(p, -1) <= self.moment:
                self.leave(p)

    def leave(self, p: int) -> None:
        stays = p in self.trace.persistent or p in self.trace.external or self.running.get(p)
        if p in self.there and not stays:
            self.there.discard(p)
            self.available -= self.trace.sizes[p]

    def end(self) -> None:
        """Release modules whose backward pass has not reported its end."""
        for module in self.backward:
            for p in self.trace.uses[module]:
                self.running.get(p, set()).discard(module)
                self.leave(p)


def simulate(trace: Trace, knobs: Knobs, passes: int = 1) -> Moves:
    """Return the elements that ``passes`` micro-batches gather, starting from an empty device."""
    there, gathered, peak = set(trace.persistent), 0, 0
    for _ in range(passes):
        one = _Pass(trace, knobs, there)
        for event in trace.events:
            if event.fetches:
                one.fetch(event)
            else:
                one.release(event)
        one.end()
        gathered, peak = gathered + one.gathered, max(peak, one.peak)
    return Moves(gathered, peak)


def fewest(trace: Trace, limit: int) -> int | None:
    """Return a lower bound on gathered elements in a pass; None: a module is too large.

    It is Belady's: parameters whose next use is furthest are evicted first, the last one only in
    part, so that unequal sizes cost nothing. ``limit``: most elements at once, none persistent.
    """
    held: dict[int, int] = {}
    total = filled = 0
    for moment, every in enumerate(trace.order):
        own = [p for p in every if p not in trace.persistent]
        needed = {p: trace.sizes[p] - held.get(p, 0) for p in own}
        excess = filled + sum(needed.values()) - limit
        others = sorted((p for p in held if p not in needed), reverse=True,
                        key=lambda p: _next(trace, p, moment))  # fmt: skip
        for p in others:
            gone = min(held[p], max(0, excess))
            held[p], excess, filled = held[p] - gone, excess - gone, filled - gone
        if excess > 0:
            return None
        filled += sum(needed.values())
        total += sum(needed.values())
        held.update({p: trace.sizes[p] for p in own})
    return total


def _next(trace: Trace, p: int, moment: int) -> int:
    following = trace.walk.next_use(p, moment)
    return len(trace.order) if following is None else following


class GatherChoice(NamedTuple):
    """Settings that a search has chosen, and the elements that a step then gathers."""

    knobs: Knobs
    moves: Moves


def choose(trace: Trace, limit: int, passes: int = 1) -> GatherChoice | None:
    """Return the settings that gather least within ``limit`` elements; None if none fit.

    Among settings within ``SLACK`` of the fewest it takes the one with the longest prefetch.
    """
    found: list[GatherChoice] = []
    for knobs in _settings(trace, limit):
        moves = simulate(trace, knobs, passes)
        if moves.peak <= limit:
            found.append(GatherChoice(knobs, moves))
    if not found:
        return None
    least = min(one.moves.gathered for one in found)
    near = [one for one in found if one.moves.gathered <= SLACK * least]
    return max(near, key=lambda one: (one.knobs.prefetch, -one.moves.gathered, -one.moves.peak))


def _settings(trace: Trace, limit: int) -> Iterator[Knobs]:
    """Yield settings to try: reuse on a grid, refined near the largest that fits unprefetched."""
    whole, step = max(walk.before[-1] for walk in trace.walks), 4 if len(trace.order) > LONG else 1
    reuses = {int(share * whole) + 1 for share in REUSE[::step]} | {0}
    low, high = 0, whole + 1  # bisect for the longest reuse distance that fits without a prefetch
    while high - low > max(1, whole // 4096):
        middle = (low + high) // 2
        if simulate(trace, Knobs(0, limit, middle)).peak <= limit:
            low = middle
        else:
            high = middle
    reuses |= {low, max(0, low - limit // 16), max(0, low - limit // 8)}
    reuses = {reuse for reuse in reuses if reuse <= low}  # a prefetch takes more room, not less
    for prefetch in dict.fromkeys(int(share * trace.moved) for share in PREFETCH):
        for live in (limit, limit * 3 // 4) if prefetch else (limit,):
            yield from (Knobs(prefetch, live, reuse) for reuse in sorted(reuses))
