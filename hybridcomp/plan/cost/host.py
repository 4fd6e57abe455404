"""What an engine's step costs beside layers and messages, from its own small trainings.

``hybridcomp measure`` had the engine train a few blocks. The same step is priced here by the same
model as a plan, and what it took longer is the engine's: its hooks and copies for every value, its
Python for every micro-batch and step, and what codecs cost in the engine beyond themselves. Of the
native trainings two sizes tell what grows with the parameters; of the others, whose difference to
native is work on values, one does. Where a training was faster than its price, messages were hidden
behind compute, and the share of that is what ``overlap`` means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hybridcomp.plan.choices import Choices
from hybridcomp.plan.machines.figures import Figure
from hybridcomp.plan.machines.rows import Training
from hybridcomp.plan.models.model import Layer, Shape

#: what gradients are: as they are, encoded, encoded with error feedback
Style = Literal["native", "plain", "feedback"]


class Line(NamedTuple):
    """Seconds: of each time, and of each parameter value on top."""

    each: float = 0.0
    per_value: float = 0.0

    def at(self, values: float) -> float:
        """The seconds of so many values."""
        return self.each + self.per_value * values

    def times(self, factor: float) -> Line:
        """So many times the seconds."""
        return Line(factor * self.each, factor * self.per_value)


class Host(NamedTuple):
    """What comes on top of a micro-batch, and once a step; the share of compute that hides."""

    micro: Line = Line()
    step: Line = Line()
    overlap: float = 0.0

    def times(self, factor: float) -> Host:
        """So many times the seconds; what hides behind compute stays the same share of it."""
        return Host(self.micro.times(factor), self.step.times(factor), self.overlap)


#: the ZeRO stage from which on gradients are reduced behind every micro-batch
FIRST_IN_PARTS = 2
#: by ZeRO stage and style
Hosts = Mapping[tuple[int, Style], Host]


@dataclass(frozen=True)
class Blocks:
    """The model of a small training, as a ``Model``."""

    row: Training

    name = "blocks"
    is_chain = True

    @property
    def depth(self) -> int:
        """Blocks of the chain."""
        return self.row.blocks

    @property
    def parameters(self) -> float:
        """Of all blocks."""
        return float(self.row.blocks * self.row.parameters)

    @property
    def repeated(self) -> range:
        """All of them."""
        return range(self.row.blocks)

    def layers(self, shape: Shape) -> tuple[Layer, ...]:
        """Equal blocks, of which nothing is kept: nobody asks a small training for memory."""
        row, one = self.row, float(self.row.parameters)
        block = Layer("block", "block", row.flops, 2 * row.flops, 0.0, one, 0.0, 0.0, 0.0, 0.0, 0.0)
        return (block,) * row.blocks

    def shared(self, shape: Shape) -> float:
        """Nothing."""
        return 0.0

    def refuses(self, shape: Shape) -> str | None:
        """Nothing."""
        return None


class Taken(NamedTuple):
    """A training, and what its price says: of a micro-batch, of the last one, of its compute."""

    row: Training
    micro: float
    last: float
    compute: float


def style_of(choices: Choices) -> Style:
    """The style of what travels between replicas."""
    choice = choices["dp", "forward"]
    if choice.native:
        return "native"
    return "feedback" if choice.error_feedback else "plain"


def choices_of(row: Training) -> Choices:
    """What the block of a training chooses; nothing where it has none."""
    return Choices.of_block(dict(row.block)) if row.block else Choices()


def hosts_of(taken: Iterable[Taken]) -> dict[tuple[int, Style], Host]:
    """What the trainings of each ZeRO stage and style say."""
    groups: dict[tuple[int, Style], list[Taken]] = {}
    for one in _evened(taken):
        style = style_of(choices_of(one.row))
        groups.setdefault((one.row.zero_stage, style), []).append(one)
    found: dict[tuple[int, Style], Host] = {}
    for key in sorted(groups, key=lambda key: key[1] != "native"):
        found[key] = _host(groups[key], found.get((key[0], "native"), Host()))
    return found


def _evened(taken: Iterable[Taken]) -> list[Taken]:
    """The trainings, whose micro-batches without messages are the same whatever the style is.

    Below ZeRO 2 nothing travels before the last micro-batch: those of all styles are timings of one
    thing, and their mean is nearer to it than each.
    """
    every = list(taken)
    groups: dict[tuple[int, int], list[Figure]] = {}
    for one in every:
        groups.setdefault((one.row.zero_stage, one.row.blocks), []).append(one.row.micro)
    means = {key: Figure.total(own).times(1 / len(own)) for key, own in groups.items()}
    return [
        one._replace(row=replace(one.row, micro=means[one.row.zero_stage, one.row.blocks]))
        if one.row.zero_stage < FIRST_IN_PARTS else one
        for one in every
    ]  # fmt: skip


def least(hosts: Iterable[Host]) -> Host:
    """One that is at most as slow as each of ``hosts`` (at least one)."""
    known = list(hosts)
    micro, step = ([getattr(one, name) for one in known] for name in ("micro", "step"))
    return Host(
        Line(min(one.each for one in micro), min(one.per_value for one in micro)),
        Line(min(one.each for one in step), min(one.per_value for one in step)),
        max(one.overlap for one in known),
    )


def nearest(hosts: Hosts, zero_stage: int, style: Style) -> Host:
    """Of the stage and style, or of what is most like them: other stages before other styles."""
    if not hosts:
        return Host()
    return hosts[min(hosts, key=lambda key: (key[1] != style, abs(key[0] - zero_stage), key[0]))]


def _host(taken: Sequence[Taken], native: Host) -> Host:
    values = [float(one.row.blocks * one.row.parameters) for one in taken]
    micro = [one.row.micro.value - one.micro for one in taken]
    last = [one.row.last.value - one.last for one in taken]
    line = _line(values, micro, native.micro.each)
    # the last micro-batch is one like the others, and then come the reduction and the optimizer
    beyond = [late - line.at(size) for late, size in zip(last, values, strict=True)]
    most = max(range(len(taken)), key=lambda index: values[index])
    hidden = -(micro[most] + last[most]) / (2 * taken[most].compute) if taken[most].compute else 0.0
    return Host(line, _line(values, beyond, native.step.each), min(1.0, max(0.0, hidden)))


def _line(values: Sequence[float], seconds: Sequence[float], each: float) -> Line:
    """The line through two sizes; through one with what there is ``each`` time. Never below 0."""
    low, high = (pick(range(len(values)), key=lambda i: values[i]) for pick in (min, max))
    if values[low] < values[high]:
        slope = (seconds[high] - seconds[low]) / (values[high] - values[low])
        slope = max(0.0, slope)
        middle = sum(seconds) / len(seconds) - slope * sum(values) / len(values)
        if middle < 0.0 < slope:  # all of it grows with the values
            return Line(0.0, max(0.0, seconds[high] / values[high]))
        return Line(max(0.0, middle), slope)
    return Line(each, max(0.0, seconds[high] - each) / values[high])
