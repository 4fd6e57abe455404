"""Find the fastest choices of a placed layout that fit into memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hybridcomp.config.directional import STATE_CODECS
from hybridcomp.config.hierarchy_level import SUMMED
from hybridcomp.dimensions import KEYS, ROWS, Key
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import device_nbytes, kept_by_codecs, memory_of
from hybridcomp.tools.plan.cost.step import seconds_of
from hybridcomp.tools.plan.cost.times import least_seconds, stage_times
from hybridcomp.tools.plan.cost.work import Ideal, Work, lands_behind, price
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.search.budget import AllowedChoices

#: seconds of an option by stage (serial, coding, link), then the bytes that it keeps
Costs = tuple[float, ...]
#: the messages that ``dp.accumulate`` changes
SUMS: frozenset[Key] = frozenset({("dp", "forward")})
#: combinations of choices that are simulated for one layout
MOST = 64


@dataclass(frozen=True)
class Best:
    """The best choices of a layout, the seconds of a step, and the combinations tried so far."""

    seconds: float
    choices: Choices
    simulated: int


@dataclass(eq=False)
class Evaluator:
    """Evaluates and ranks choices for placed layouts."""

    job: PlannedJob
    budget: AllowedChoices
    _ideals: dict[int, Ideal] = field(default_factory=dict)
    _bases: dict[Layout, list[float]] = field(default_factory=dict)

    def ideal(self, zero_stage: int) -> Ideal:
        """Return prices that no choice of this budget undercuts at a ZeRO stage."""
        if zero_stage not in self._ideals:
            keys = [key for name, _ in self.budget.allowed for key in KEYS if key[0] == name]
            options = ((key, options_of(self.job, self.budget, key, zero_stage)) for key in keys)
            self._ideals[zero_stage] = Ideal(tuple(options))
        return self._ideals[zero_stage]

    def bound(self, work: Work) -> float:
        """Return a lower bound of a step's seconds over all choices of the budget."""
        ideal = self.ideal(work.layout.zero_stage)
        return least_seconds(work, stage_times(self.job, work, ideal))

    def seconds(self, work: Work, choices: Choices) -> float:
        """Return the seconds of a step with ``choices``."""
        return seconds_of(work.layout, stage_times(self.job, work, choices))

    def fits(self, work: Work, choices: Choices) -> bool:
        """Return whether every rank also has memory for residuals, references and payloads."""
        return self.need(work, choices) <= self.job.capacity

    def need(self, work: Work, choices: Choices) -> float:
        """Return the device bytes of the fullest rank."""
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
        """Find the fastest choices that fit; None where none do.

        Of equally fast choices the first in the budget wins; native comes before all. At most
        ``most`` combinations that fit are tried, in the order of their summed seconds.
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
        """Return the options of every key with messages, without dominated ones.

        An option dominates another if no part of any stage takes longer with it, and it keeps no
        more bytes. Each option comes with its seconds summed over all stages.
        """
        keys = _keys(work)
        roomy = self.need(work, Choices()) + self.largest(work) <= self.job.capacity
        found: dict[Key, tuple[tuple[float, Choice], ...]] = {}
        for key in keys:
            kept: list[tuple[Costs, Choice]] = []
            for choice in options_of(self.job, self.budget, key, work.layout.zero_stage):
                if choice.native and key in SUMS and work.layout.sums_ours:
                    continue  # sums that cross nodes need a codec
                costs = self._costs(work, key, choice, roomy)
                if any(_beats(other, costs) for other, _ in kept):
                    continue
                kept = [(other, one) for other, one in kept if not _beats(costs, other)]
                kept.append((costs, choice))
            found[key] = tuple((sum(costs[:-1]), choice) for costs, choice in kept)
        return found

    def _costs(self, work: Work, key: Key, choice: Choice, roomy: bool) -> Costs:
        """Return seconds of ``choice`` by stage, and last the bytes it keeps (0 if ``roomy``)."""
        choices = Choices.of({key: choice})
        costs: list[float] = []
        kept = 0.0
        for stage in work.stages:
            serial = coding = link = 0.0
            # compute may hide the link seconds of these sends
            sent = (one.sent for one in (*stage.forward, *stage.backward))
            apart = work.layout.slices or self.job.has_blocking_pipeline(work.layout)
            posted = tuple(sent) if apart else ()
            for items, once in stage.messages():
                behind = items is stage.reduce or items is stage.micro or items in posted
                count = 1 if once else work.layout.passes
                for item in items:
                    if item.key != key or item.fixed:
                        continue
                    one = price(self.job, item, choices)
                    # compute may hide a part of the link
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

    def largest(self, work: Work) -> float:
        """Return the total bytes of codec buffers, each as large as the largest choice makes it."""
        zero_stage = work.layout.zero_stage
        most: dict[str, float] = {}
        for key in _keys(work):
            for choice in options_of(self.job, self.budget, key, zero_stage):
                for stage in work.stages:
                    found = kept_by_codecs(self.job, work.layout, stage, Choices.of({key: choice}))
                    for name, nbytes in found.items():
                        most[name] = max(most.get(name, 0.0), nbytes)
        return sum(most.values())


def _keys(work: Work) -> dict[Key, None]:
    """Return the keys of messages that choices are about."""
    return dict.fromkeys(
        item.key for stage in work.stages for items, _ in stage.messages() for item in items
        if not item.fixed and item.call.ranks > 1
    )  # fmt: skip


def options_of(
    job: PlannedJob, budget: AllowedChoices, key: Key, zero_stage: int
) -> tuple[Choice, ...]:
    """Return the budget's options at ``key`` that take the job's dtype.

    Copies between device and host have native alone where host codecs are unknown. Where the
    cluster has sites, sums that are encoded inside sites are options as well.
    """
    options = budget.options(key, zero_stage)
    found = tuple(one for one in options if one.codec is None or one.codec.takes(job.dtype))
    if key[1] == "states":
        found = tuple(one for one in found if one.codec is None or one.codec.name in STATE_CODECS)
    if not ROWS[key[0]].between_ranks and not job.cluster.codes_on_host:
        return found[:1]
    if key[0] in SUMMED and job.cluster.nodes_per_site:
        found = (*found, *budget.inside(found))
    return found


def _beats(one: Costs, other: Costs) -> bool:
    """Return whether ``one`` is nowhere worse, up to rounding of sums in the last digits."""
    return all(a <= b * (1 + 1e-12) for a, b in zip(one, other, strict=True))
