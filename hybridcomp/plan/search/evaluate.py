"""Which choices suit a placed layout best: what each costs, what fits, what a step takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridcomp.plan.choices import KEYS, NATIVE, Choice, Choices, Key
from hybridcomp.plan.cost.job import Item, Job
from hybridcomp.plan.cost.memory import device_nbytes, kept_by_codecs, memory_of
from hybridcomp.plan.cost.prices import Price
from hybridcomp.plan.cost.step import seconds_of
from hybridcomp.plan.cost.times import least_seconds, stage_times
from hybridcomp.plan.cost.work import Items, Stage, Work, lands_behind, price
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.search.budget import Budget

#: by stage and kind of message, what an option takes; and bytes that it keeps
Costs = tuple[float, ...]
#: combinations of choices that are simulated for one layout
MOST = 64


@dataclass(frozen=True)
class Ideal:
    """A wish: of every message the fastest coding and the fastest wire that any option has.

    No choices are faster, which is what bounds need.
    """

    options: tuple[tuple[Key, tuple[Choice, ...]], ...]

    def price(self, job: Job, item: Item) -> Price:
        """The best of every part."""
        table = dict(self.options)
        found = [
            job.prices.of(item.call, choice, item.dtype, item.key[0])
            for choice in ((NATIVE,) if item.fixed else table.get(item.key, (NATIVE,)))
        ]
        fastest = Price(
            min(one.coding for one in found),
            min(one.wire for one in found),
            min(one.inside for one in found),
        )
        return fastest.times(item.count)


@dataclass(frozen=True)
class Best:
    """The best choices of a layout, what a step takes with them, and how many were simulated."""

    seconds: float
    choices: Choices
    simulated: int


@dataclass(eq=False)
class Evaluator:
    """Judges choices for placed layouts."""

    job: Job
    budget: Budget
    _ideals: dict[int, Ideal] = field(default_factory=dict)
    _bases: dict[Layout, list[float]] = field(default_factory=dict)

    def ideal(self, zero_stage: int) -> Ideal:
        """The wish of this budget."""
        if zero_stage not in self._ideals:
            keys = [key for name, _ in self.budget.allowed for key in _keys_of(name)]
            options = ((key, options_of(self.job, self.budget, key, zero_stage)) for key in keys)
            self._ideals[zero_stage] = Ideal(tuple(options))
        return self._ideals[zero_stage]

    def bound(self, work: Work) -> float:
        """Seconds that no choices of the budget can beat."""
        ideal = self.ideal(work.layout.zero_stage)
        return least_seconds(work, stage_times(self.job, work, ideal))

    def seconds(self, work: Work, choices: Choices) -> float:
        """Of a step."""
        return seconds_of(work.layout, stage_times(self.job, work, choices))

    def fits(self, work: Work, choices: Choices) -> bool:
        """Whether every rank has room for the choices' residuals, references and payloads."""
        return self.need(work, choices) <= self.job.capacity

    def need(self, work: Work, choices: Choices) -> float:
        """Bytes of the fullest rank's device."""
        if work.layout not in self._bases:
            self._bases[work.layout] = [
                device_nbytes(memory_of(self.job, work, stage, Choices()))
                for stage in range(len(work.stages))
            ]
        return max(
            base + sum(kept_by_codecs(self.job, work.layout, stage, choices).values())
            for base, stage in zip(self._bases[work.layout], work.stages, strict=True)
        )

    def best(self, work: Work, most: int = MOST) -> Best | None:
        """The fastest choices that fit; None where none does.

        Of equal ones that which comes first in the budget stands, native before all. Where memory
        leaves more than ``most`` combinations to choose from, the most promising are looked at.
        """
        table = self.options(work)
        combinations = [
            (sum(cost for cost, _ in combination), index, combination)
            for index, combination in enumerate(itertools.product(*table.values()))
        ]
        best: Best | None = None
        count = 0
        for _, _, combination in sorted(combinations, key=lambda one: one[:2]):
            choices = Choices.of(
                {key: choice for key, (_, choice) in zip(table, combination, strict=True)}
            )
            if not self.fits(work, choices):
                continue
            times = stage_times(self.job, work, choices)
            if best is None or least_seconds(work, times) < best.seconds:
                seconds = seconds_of(work.layout, times)
                if best is None or seconds < best.seconds * (1 - 1e-9):
                    best = Best(seconds, choices, count + 1)
            count += 1
            if count == most:
                break
        return best

    def options(self, work: Work) -> dict[Key, tuple[tuple[float, Choice], ...]]:
        """The options of every key that sends something, without those that another one beats.

        One beats another where it takes no longer on any stage, in no part, and keeps no more.
        With each stands what it takes on all stages together.
        """
        keys = dict.fromkeys(
            item.key for stage in work.stages for items in _all(stage) for item in items
            if not item.fixed and item.call.ranks > 1
        )  # fmt: skip
        roomy = self._roomy(work, list(keys))
        found: dict[Key, tuple[tuple[float, Choice], ...]] = {}
        for key in keys:
            kept: list[tuple[Costs, Choice]] = []
            for choice in options_of(self.job, self.budget, key, work.layout.zero_stage):
                costs = self._costs(work, key, choice, roomy)
                if any(_beats(other, costs) for other, _ in kept):
                    continue
                kept = [(other, one) for other, one in kept if not _beats(costs, other)]
                kept.append((costs, choice))
            found[key] = tuple((sum(costs[:-1]), choice) for costs, choice in kept)
        return found

    def _costs(self, work: Work, key: Key, choice: Choice, roomy: bool) -> Costs:
        """What ``choice`` takes on every stage; last the bytes that it keeps, if they matter."""
        choices = Choices.of({key: choice})
        costs: list[float] = []
        kept = 0.0
        for stage in work.stages:
            serial = coding = link = 0.0
            # what is sent is not all that its stage waits for
            sent = (one.sent for one in (*stage.forward, *stage.backward))
            apart = work.layout.slices or self.job.meets(work.layout)
            posted = tuple(sent) if apart else ()
            for items in _all(stage):
                behind = items is stage.reduce or items is stage.micro or items in posted
                once = items is stage.reduce or items is stage.gather or items is stage.copies
                count = 1 if once else work.layout.passes
                for item in items:
                    if item.key != key or item.fixed:
                        continue
                    one = price(self.job, item, choices)
                    # of its link a part may be hidden
                    if behind or lands_behind(self.job, item, choices):
                        coding += count * one.coding.value
                        link += count * (one.wire.value + one.inside.value)
                    else:
                        serial += count * one.seconds.value
            costs += [serial, coding, link]
            if not roomy:
                more = kept_by_codecs(self.job, work.layout, stage, choices)
                kept = max(kept, sum(more.values()))
        return (*costs, kept)

    def _roomy(self, work: Work, keys: Sequence[Key]) -> bool:
        """Whether bytes do not matter: what keeps most fits on every dimension at once."""
        zero_stage = work.layout.zero_stage
        most: dict[str, float] = {}
        for key in keys:
            for choice in options_of(self.job, self.budget, key, zero_stage):
                for stage in work.stages:
                    found = kept_by_codecs(self.job, work.layout, stage, Choices.of({key: choice}))
                    for name, nbytes in found.items():
                        most[name] = max(most.get(name, 0.0), nbytes)
        return self.need(work, Choices()) + sum(most.values()) <= self.job.capacity


def options_of(job: Job, budget: Budget, key: Key, zero_stage: int) -> tuple[Choice, ...]:
    """What the budget allows at ``key``; copies stay native where no host's codecs are known."""
    found = budget.options(key, zero_stage)
    return found[:1] if key[0] == "offload" and not job.cluster.codes_on_host else found


def _keys_of(name: str) -> Iterator[Key]:
    return (key for key in KEYS if key[0] == name)


def _all(stage: Stage) -> Iterator[Items]:
    for one in (*stage.forward, *stage.backward):
        yield one.items
        yield one.sent
    yield stage.micro
    yield stage.reduce
    yield stage.gather
    yield stage.copies


def _beats(one: Costs, other: Costs) -> bool:
    """Whether ``one`` is nowhere worse; sums of the same parts differ in the last digits."""
    return all(a <= b * (1 + 1e-12) for a, b in zip(one, other, strict=True))
