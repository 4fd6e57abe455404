"""Describe the weights of an engine on this rank, and divide them among all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.job import small_messages
from hybridcomp.job.agreement import tell
from hybridcomp.publishing.weight_ranges import WeightRange, divide

#: published dtypes, by their names in a block and in a manifest
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: further kinds of values, held as 16-bit patterns: FP8 (E4M3) values, E8M0 scales, and fp32 scales
#: of two patterns each
FP8, E8M0, FP32 = "fp8", "e8m0", "fp32"
#: dtype of the patterns, by every kind that a manifest may name
PATTERNS: dict[str, torch.dtype] = {**DTYPES, **dict.fromkeys((FP8, E8M0, FP32), torch.bfloat16)}
#: entries of a table: name of a parameter -> its shape and the name of its dtype
Table = dict[str, tuple[tuple[int, ...], str]]
KEY = "publish"
#: namings under which weights are published
OWN, HUGGING_FACE = "own", "hf"
NAMINGS = (OWN, HUGGING_FACE)


@dataclass(frozen=True)
class Held:
    """A range that this rank holds.

    Attributes:
        read: returns the range's current values, in any shape and dtype.
        part: returns values ``low`` to ``high`` as published, 1-D; None: the publisher calls
            ``read`` and casts the values to the published dtype.
    """

    stretch: WeightRange
    read: Callable[[], Tensor]
    part: Callable[[int, int], Tensor] | None = None


class Quantizes(Protocol):
    """Scales of 8-bit published weights; all ranks call both methods."""

    def bind(self, divided: DividedWeights) -> None:
        """Store the ranges that this rank publishes, and the table of all ranks."""

    def measure(self) -> None:
        """Find the largest magnitudes before the values of a version are read."""


@dataclass(frozen=True)
class EngineWeights:
    """Weights of an engine as this rank holds them.

    Attributes:
        shapes: whole shape of every parameter that this rank knows, by its Hugging Face name.
        dtypes: dtype in which the model computes with each parameter.
        held: the ranges that this rank holds.
        aliases: further names of tied parameters, with the name under which each is published.
        ranks: global ranks of the job, in order; all of them call the publisher together.
        ready: called on all ranks before weights are read; finishes pending gathers.
        unchanged: called on all ranks before each version; raises PublishError if the engine now
            uses other parameters.
        hugging_face: returns the same weights with Hugging Face's names, shapes and cuts; None if
            the module already has them, or if Hugging Face's form is unknown.
        module: returns the model that owns the parameters, while it lives; None if unknown.
        kinds: parameters that are not 16-bit weights, by name -> kind of values, one of PATTERNS.
        quantizer: measures scales before a version's values are read, if ``kinds`` has any.
        refused: why this rank's weights cannot be published; all ranks then raise it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    held: Sequence[Held]
    ranks: tuple[int, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], object] = lambda: None
    unchanged: Callable[[], object] = lambda: None
    hugging_face: Callable[[], EngineWeights] | None = None
    module: Callable[[], Any] = lambda: None
    kinds: Mapping[str, str] = field(default_factory=dict)
    quantizer: Quantizes | None = None
    refused: ConfigError | None = None


def unless_refused(make: Callable[[], EngineWeights], ranks: tuple[int, ...]) -> EngineWeights:
    """Return ``make()``; if it raises ConfigError, return weights that refuse with that error."""
    try:
        return make()
    except ConfigError as error:
        return EngineWeights({}, {}, [], ranks, refused=error)


class _AsShown(str):
    """Text about another rank's value, which an error message shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Owned:
    """A part of a ``Held`` that this rank publishes: positions ``low`` to ``high``."""

    held: Held
    low: int
    high: int

    @property
    def stretch(self) -> WeightRange:
        """Return the range of these values in their parameter."""
        return self.held.stretch.cut(self.low, self.high)


@dataclass(frozen=True)
class DividedWeights:
    """Weights of a job: one table for all ranks, and the parts that this rank publishes."""

    table: Table
    aliases: dict[str, str]
    owned: list[Owned]

    @property
    def numel(self) -> int:
        """Return the number of weights of the job."""
        return sum(math.prod(shape) for shape, _ in self.table.values())


def named(weights: EngineWeights, names: str) -> EngineWeights:
    """Return ``weights`` under the naming ``names``, one of NAMINGS.

    Raises ConfigError if the engine has no such names, or the model's family is unknown.
    """
    if names not in NAMINGS:
        raise ConfigError(f"{KEY}.names", names, f"expected one of {', '.join(NAMINGS)}")
    if names == OWN or weights.refused is not None:
        return weights
    if weights.hugging_face is None:
        todo = "weights of this engine have the names of its module already; leave it out"
        raise ConfigError(f"{KEY}.names", names, todo)
    return weights.hugging_face()


def published_dtype(weights: EngineWeights, asked: str | None) -> dict[str, str]:
    """Return the name of the dtype in which each parameter is published.

    Raises ConfigError if a parameter is not 16-bit and ``asked`` names no dtype, if it names
    another 16-bit dtype than the model's, or if values are not floating-point.
    """
    if asked is not None and asked not in DTYPES:
        raise ConfigError(f"{KEY}.dtype", asked, f"expected one of {', '.join(DTYPES)}, or nothing")
    found = {}
    for name, dtype in weights.dtypes.items():
        if name in weights.kinds:
            found[name] = weights.kinds[name]
            continue
        if not dtype.is_floating_point:
            shown = _AsShown(f"{name} of {str(dtype).removeprefix('torch.')}")
            todo = "16-bit floating-point weights are published; make it a buffer"
            raise ConfigError(KEY, shown, todo)
        own = NAMES.get(dtype)
        if own is None and asked is None:
            kind = str(dtype).removeprefix("torch.")
            todo = f'{name} is {kind}, and 16-bit weights are published; write "dtype": "bf16"'
            raise ConfigError(f"{KEY}.dtype", None, todo)
        if own is not None and asked not in (None, own):
            todo = f"{name} is {own}: what the model computes with is published; leave it out"
            raise ConfigError(f"{KEY}.dtype", asked, todo)
        found[name] = own or str(asked)
    return found


def agree_on_weights(weights: EngineWeights, asked: str | None) -> DividedWeights:
    """Exchange which weights the ranks hold, and divide them among the ranks; a collective.

    Raises ConfigError like ``published_dtype`` and if a rank refuses its engine; PublishError if
    ranks state different shapes for a name, or if values of a parameter are held by no rank, or by
    two ranks in different cuts.
    """
    problem, dtypes = None, dict.fromkeys(weights.shapes, "")
    try:
        if weights.refused is not None:
            raise weights.refused
        dtypes = published_dtype(weights, asked)
    # raised below, on all ranks: pipeline stages may have different layers
    except ConfigError as error:
        problem = (error.key, repr(error.found), error.todo)
    mine = {
        "problem": problem,
        "table": {name: (list(shape), dtypes[name]) for name, shape in weights.shapes.items()},
        "aliases": dict(weights.aliases),
        "held": [astuple(one.stretch) for one in weights.held],
    }
    if len(weights.ranks) < dist.get_world_size():
        said = tell(mine, what="published weights", ranks=weights.ranks)
    else:
        said = small_messages.gather_objects(mine)
    for statement in said:
        if statement["problem"] is not None:
            key, shown, todo = statement["problem"]
            raise ConfigError(key, _AsShown(shown), todo)
    table, aliases = _merged(said)
    held = [[WeightRange(*row) for row in statement["held"]] for statement in said]
    _check_cover(table, {stretch for row in held for stretch in row})
    place = weights.ranks.index(dist.get_rank())
    owned = [Owned(weights.held[n], low, high) for n, low, high in divide(held, place)]
    return DividedWeights(table, aliases, owned)


def _merged(said: Iterable[Mapping[str, Any]]) -> tuple[Table, dict[str, str]]:
    table: Table = {}
    aliases: dict[str, str] = {}
    for rank, statement in enumerate(said):
        for name, (shape, dtype) in statement["table"].items():
            entry = (tuple(shape), dtype)
            if table.setdefault(name, entry) != entry:
                raise PublishError(
                    f"{name}: rank {rank} of the job has {entry}, another one {table[name]}; "
                    "publish engines whose ranks hold parts of one model"
                )
        aliases.update(statement["aliases"])
    return dict(sorted(table.items())), dict(sorted(aliases.items()))


def _check_cover(table: Table, stretches: Iterable[WeightRange]) -> None:
    """Raise PublishError unless the ranges cover every value of the table exactly once."""
    for name, want, found in uncovered(table, stretches):
        what = "parts that overlap" if found < 0 else f"parts of {found} values together"
        raise PublishError(
            f"{name}: its {want} values are held in {what}; report this with the engine's version "
            "and settings"
        )


def uncovered(table: Table, stretches: Iterable[WeightRange]) -> list[tuple[str, int, int]]:
    """Return parameters whose values are not covered exactly once: name, want, found.

    ``found`` is -1 if ranges overlap, end beyond the parameter, or belong to an unknown one.
    """
    held: dict[str, list[WeightRange]] = {name: [] for name in table}
    for stretch in stretches:
        held.setdefault(stretch.name, []).append(stretch)
    wrong = []
    for name, parts in held.items():
        want = math.prod(table[name][0]) if name in table else -1
        found = sum(part.numel for part in parts)
        is_beyond = any(part.start < 0 or part.end > want for part in parts)
        if is_beyond or (found == want and not _leave_none(parts, want)):
            found = -1
        if found != want or want < 0:
            wrong.append((name, max(want, 0), found))
    return wrong


def _leave_none(parts: Sequence[WeightRange], numel: int) -> bool:
    """Return whether the ranges are disjoint and cover all ``numel`` values of a parameter."""
    if all(part.runs == 1 for part in parts):
        some = sorted(part for part in parts if part.numel)
        ends = [0, *(one.end for one in some)]
        return [*(one.start for one in some), numel] == ends
    seen = torch.zeros(numel, dtype=torch.bool, device="cpu")
    for part in parts:
        part.of(seen).fill_(True)
    return bool(seen.all())
