"""Estimate an engine's overhead, in addition to layers and messages, from small trainings.

``hybridcomp measure`` lets the engine train a few blocks. This module prices the same step by the
same model as a plan; the difference is the engine's overhead: its hooks and copies for every value,
its Python for every micro-batch and step, and the cost of codecs in the engine beyond the codecs
themselves. Native trainings of two sizes show which part grows with the parameters; encoded
trainings differ from these by work on values, so that a single size is enough. If a training was
faster than its price, compute hid messages, and ``overlap`` is the fraction of compute that hid
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.rows import TrainedSmall
from hybridcomp.tools.plan.models.model import BatchShape, ModelLayer

#: gradients: native, encoded, encoded with error feedback
Style = Literal["native", "plain", "feedback"]


class Line(NamedTuple):
    """Seconds of an event: a constant, plus a term for each parameter value."""

    each: float = 0.0
    per_value: float = 0.0

    def at(self, values: float) -> float:
        """Return the seconds for ``values`` parameter values."""
        return self.each + self.per_value * values

    def times(self, factor: float) -> Line:
        """Return the line with constant and slope multiplied by ``factor``."""
        return Line(factor * self.each, factor * self.per_value)


class Host(NamedTuple):
    """Overhead of each micro-batch and each step; the fraction of compute that hides messages."""

    micro: Line = Line()
    step: Line = Line()
    overlap: float = 0.0

    def times(self, factor: float) -> Host:
        """Return the seconds multiplied by ``factor``; the overlap stays the same share."""
        return Host(self.micro.times(factor), self.step.times(factor), self.overlap)


#: lowest ZeRO stage at which gradients are reduced after every micro-batch
FIRST_IN_PARTS = 2
#: by ZeRO stage and style
Hosts = Mapping[tuple[int, Style], Host]


@dataclass(frozen=True)
class OverheadModel:
    """The model of a small training, as a ``Model``."""

    row: TrainedSmall

    name = "blocks"
    is_chain = True

    @property
    def depth(self) -> int:
        return self.row.blocks

    @property
    def parameters(self) -> float:
        return float(self.row.blocks * self.row.parameters)

    @property
    def repeated(self) -> range:
        return range(self.row.blocks)

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        """Return equal blocks without bytes: the memory of a small training is never estimated."""
        row, one = self.row, float(self.row.parameters)
        block = ModelLayer(
            "block", "block", row.flops, 2 * row.flops, 0.0, one, 0.0, 0.0, 0.0, 0.0, 0.0
        )
        return (block,) * row.blocks

    def shared(self, shape: BatchShape) -> float:
        return 0.0

    def refuses(self, shape: BatchShape) -> str | None:
        return None


class Taken(NamedTuple):
    """A training and its predicted seconds: a micro-batch, the last micro-batch, and compute."""

    row: TrainedSmall
    micro: float
    last: float
    compute: float


def style_of(choices: Choices) -> Style:
    """Return the style of the gradients that the replicas reduce."""
    choice = choices["dp", "forward"]
    if choice.native:
        return "native"
    return "feedback" if choice.error_feedback else "plain"


def choices_of(row: TrainedSmall) -> Choices:
    """Return the choices of a training's block; native ones where it has none."""
    return Choices.of_block(dict(row.block)) if row.block else Choices()


def hosts_of(taken: Iterable[Taken]) -> dict[tuple[int, Style], Host]:
    """Fit the overhead of each ZeRO stage and style to its trainings."""
    groups: dict[tuple[int, Style], list[Taken]] = {}
    for one in _evened(taken):
        style = style_of(choices_of(one.row))
        groups.setdefault((one.row.zero_stage, style), []).append(one)
    found: dict[tuple[int, Style], Host] = {}
    for key in sorted(groups, key=lambda key: key[1] != "native"):
        found[key] = _host(groups[key], found.get((key[0], "native"), Host()))
    return found


def _evened(taken: Iterable[Taken]) -> list[Taken]:
    """Average the seconds of micro-batches without messages over all styles below ZeRO 2.

    Below ZeRO 2 nothing is sent before the last micro-batch: trainings of all styles time the same
    work there, and the mean has a smaller error than any one of them.
    """
    every = list(taken)
    groups: dict[tuple[int, int], list[Estimate]] = {}
    for one in every:
        groups.setdefault((one.row.zero_stage, one.row.blocks), []).append(one.row.micro)
    means = {key: Estimate.total(own).times(1 / len(own)) for key, own in groups.items()}
    return [
        one._replace(row=replace(one.row, micro=means[one.row.zero_stage, one.row.blocks]))
        if one.row.zero_stage < FIRST_IN_PARTS else one
        for one in every
    ]  # fmt: skip


def least(hosts: Iterable[Host]) -> Host:
    """Return a lower bound of the overhead of all ``hosts`` (at least one)."""
    known = list(hosts)
    micro, step = (
        Line(*map(min, zip(*(getattr(one, name) for one in known), strict=True)))
        for name in ("micro", "step")
    )
    return Host(micro, step, max(one.overlap for one in known))


def nearest(hosts: Hosts, zero_stage: int, style: Style) -> Host:
    """Return the overhead of a ZeRO stage and style, or of the nearest stage with that style.

    Uses another style only if this style has no training. Without hosts it is zero.
    """
    if not hosts:
        return Host()
    return hosts[min(hosts, key=lambda key: (key[1] != style, abs(key[0] - zero_stage), key[0]))]


def _host(taken: Sequence[Taken], native: Host) -> Host:
    values = [float(one.row.blocks * one.row.parameters) for one in taken]
    micro = [one.row.micro.value - one.micro for one in taken]
    last = [one.row.last.value - one.last for one in taken]
    line = _line(values, micro, native.micro.each)
    # the last micro-batch takes as long as the others, followed by reduction and optimizer
    beyond = [late - line.at(size) for late, size in zip(last, values, strict=True)]
    most = max(range(len(taken)), key=lambda index: values[index])
    hidden = -(micro[most] + last[most]) / (2 * taken[most].compute) if taken[most].compute else 0.0
    return Host(line, _line(values, beyond, native.step.each), min(1.0, max(0.0, hidden)))


def _line(values: Sequence[float], seconds: Sequence[float], each: float) -> Line:
    """Fit a line >= 0 to the smallest and the largest size; one size: with constant ``each``."""
    low, high = (pick(range(len(values)), key=lambda i: values[i]) for pick in (min, max))
    if values[low] < values[high]:
        slope = (seconds[high] - seconds[low]) / (values[high] - values[low])
        slope = max(0.0, slope)
        middle = sum(seconds) / len(seconds) - slope * sum(values) / len(values)
        if middle < 0.0 < slope:  # the constant would be negative: take a line through the origin
            return Line(0.0, max(0.0, seconds[high] / values[high]))
        return Line(max(0.0, middle), slope)
    return Line(each, max(0.0, seconds[high] - each) / values[high])
