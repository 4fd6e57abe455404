"""Which choices suit a placed layout best: what each costs, what fits, what a step takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridcomp.plan.budget import Budget
from hybridcomp.plan.choices import KEYS, NATIVE, Choice, Choices, Key
from hybridcomp.plan.job import Item, Job
from hybridcomp.plan.memory import device_nbytes, memory_of
from hybridcomp.plan.prices import Price
from hybridcomp.plan.step import Step, View, least_seconds, simulated, stage_times
from hybridcomp.plan.work import Items, Stage, Work, price

#: by stage and kind of message, what an option takes; and bytes that it keeps
Costs = tuple[float, ...]


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
            job.prices.of(item.call, choice, item.dtype)
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
    step: Step
    simulated: int


@dataclass(eq=False)
class Evaluator:
    """Judges choices for placed layouts."""

    job: Job
    budget: Budget
    _ideals: dict[int, Ideal] = field(default_factory=dict)

    def ideal(self, zero_stage: int) -> Ideal:
        """The wish of this budget."""
        if zero_stage not in self._ideals:
            keys = [key for name, _ in self.budget.allowed for key in _keys_of(name)]
            self._ideals[zero_stage] = Ideal(
                tuple((key, self.budget.options(key, zero_stage)) for key in keys)
            )
        return self._ideals[zero_stage]

    def bound(self, work: Work) -> float:
        """Seconds that no choices of the budget can beat."""
        ideal = self.ideal(work.layout.zero_stage)
        return least_seconds(work, stage_times(self.job, work, ideal, View()))

    def seconds(self, work: Work, choices: Choices) -> float:
        """Of a step."""
        return simulated(self.job, work, choices).seconds

    def fits(self, work: Work, choices: Choices) -> bool:
        """Whether every rank has room for the choices' residuals, references and payloads."""
        return self.need(work, choices) <= self.job.capacity

    def need(self, work: Work, choices: Choices) -> float:
        """Bytes of the fullest rank's device."""
        return max(
            device_nbytes(memory_of(self.job, work, stage, choices))
            for stage in range(len(work.stages))
        )

    def best(self, work: Work) -> Best | None:
        """The fastest choices that fit; None where none does.

        Of equal ones that which comes first in the budget stands, native before all.
        """
        table = self.options(work)
        best: Best | None = None
        count = 0
        for combination in itertools.product(*table.values()):
            choices = Choices.of(dict(zip(table, combination, strict=True)))
            if not self.fits(work, choices):
                continue
            times = stage_times(self.job, work, choices, View())
            if best is not None and least_seconds(work, times) >= best.seconds:
                continue
            step = simulated(self.job, work, choices)
            count += 1
            if best is None or step.seconds < best.seconds * (1 - 1e-9):
                best = Best(step.seconds, choices, step, count)
        return best

    def options(self, work: Work) -> dict[Key, tuple[Choice, ...]]:
        """The options of every key that sends something, without those that another one beats.

        One beats another where it takes no longer on any stage, in no part, and keeps no more.
        """
        found: dict[Key, tuple[Choice, ...]] = {}
        for key in dict.fromkeys(
            item.key for stage in work.stages for items in _all(stage) for item in items
            if not item.fixed and item.call.ranks > 1
        ):  # fmt: skip
            kept: list[tuple[Costs, Choice]] = []
            for choice in self.budget.options(key, work.layout.zero_stage):
                costs = self._costs(work, key, choice)
                if any(_beats(other, costs) for other, _ in kept):
                    continue
                kept = [(other, one) for other, one in kept if not _beats(costs, other)]
                kept.append((costs, choice))
            # the most promising first, so that bounds prune the rest
            kept.sort(key=lambda pair: sum(pair[0][:-1]))
            found[key] = tuple(choice for _, choice in kept)
        return found

    def _costs(self, work: Work, key: Key, choice: Choice) -> Costs:
        """What ``choice`` takes on every stage; last the bytes that it keeps beside messages."""
        choices = Choices.of({key: choice})
        costs: list[float] = []
        kept = 0.0
        for index, stage in enumerate(work.stages):
            serial = coding = link = 0.0
            for items in _all(stage):
                behind = items is stage.reduce or items is stage.micro
                for item in items:
                    if item.key != key or item.fixed:
                        continue
                    one = price(self.job, item, choices)
                    if behind:  # of its link a part may be hidden
                        coding += one.coding.value
                        link += one.wire.value + one.inside.value
                    else:
                        serial += one.seconds.value
            costs += [serial, coding, link]
            memory = memory_of(self.job, work, index, choices)
            kept = max(kept, sum(memory[name] for name in ("residuals", "references", "payloads")))
        if kept and self._roomy(work, kept):
            kept = 0.0
        return (*costs, kept)

    def _roomy(self, work: Work, kept: float) -> bool:
        """Whether bytes do not matter: every dimension could keep as much."""
        return self.need(work, Choices()) + 8 * kept <= self.job.capacity


def _keys_of(name: str) -> Iterator[Key]:
    return (key for key in KEYS if key[0] == name)


def _all(stage: Stage) -> Iterator[Items]:
    for one in (*stage.forward, *stage.backward):
        yield one.items
        yield one.sent
    yield stage.micro
    yield stage.reduce
    yield stage.gather


def _beats(one: Costs, other: Costs) -> bool:
    """Whether ``one`` is nowhere worse; sums of the same parts differ in the last digits."""
    return all(a <= b * (1 + 1e-12) for a, b in zip(one, other, strict=True))
