"""Budgets of error: the codec settings that a plan may use on each dimension."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridcomp.codecs.bounded import Bounded
from hybridcomp.codecs.registry import AUTO
from hybridcomp.dimensions import DIMENSIONS, ROWS, Dimension, Key
from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.choices import INSIDE, NATIVE, Choice

#: lossless settings to try in addition to native
LOSSLESS = (Choice.of("expcode"),)
#: lossless on deltas: twice the saving of a lossless codec on weights (docs/deltas.md)
LOSSLESS_DELTA = (Choice.of({"codec": "mpc", "delta": True}), Choice.of("stepcode"))
#: as in the preset ``recommended``: 4 bits are for gradients, whose error the optimizer averages
#: over steps (docs/results/loss.md), and for deltas, whose error the next delta corrects
BITS_8 = (Choice.of({"codec": "blockint", "bits": 8}),)
BITS_4 = (Choice.of({"codec": "blockint", "bits": 4}),)
#: setting of the messages that update secondary copies in nodes, by kind of copy
COPIES = {"exact": LOSSLESS_DELTA[1], "bits8": BITS_8[0]}
BITS_4_DELTA = (Choice.of({"codec": "blockint", "bits": 4, "delta": True}),)
#: ``dp`` bounds above this one get error feedback (configs/README.md)
FEEDBACK_FROM = 0.005
NAMES = ("recommended", "lossless", "native")

Allowed = float | str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AllowedChoices:
    """The choices that each dimension may use.

    allowed: the choices of every dimension except native, in order, for either direction.
    name: as the user wrote it. insisted: dimensions with an error bound or explicit settings, for
    which no other codec may stand in.
    """

    name: str
    allowed: tuple[tuple[Dimension, tuple[Choice, ...]], ...]
    insisted: frozenset[Dimension] = frozenset()

    @classmethod
    def parse(cls, written: str | Mapping[str, Allowed]) -> AllowedChoices:
        """Read a budget: ``"recommended"``, ``"lossless"``, ``"native"``, or one per dimension.

        A dimension takes one of the three names, an error bound (a number), a setting as the block
        writes it, or a list of settings; one that is missing stays native. Raises ConfigError.
        """
        if isinstance(written, str):
            table: Mapping[str, Allowed] = dict.fromkeys(DIMENSIONS, written)
            if written == "recommended":  # whose preset sends offload copies natively
                table = {
                    name: "lossless" if row.operation == "copy" else written
                    for name, row in ROWS.items()
                }
            label = written
        else:
            table = written
            label = " ".join(f"{name}={_short(value)}" for name, value in written.items())
        found = []
        for name, value in table.items():
            if name not in DIMENSIONS:
                known = ", ".join(DIMENSIONS)
                raise ConfigError(f"budget.{name}", value, f"expected one of {known}")
            dimension: Dimension = name
            found.append((dimension, _allowed(dimension, value)))
        own = (name for name, _ in found if not isinstance(table[name], str))
        return cls(label, tuple(found), frozenset(own))

    def options(self, key: Key, zero_stage: int = 1) -> tuple[Choice, ...]:
        """Return native and the choices allowed at ``key``; deltas only below ZeRO 3."""
        choices = dict(self.allowed).get(key[0], ())
        fitting = [choice for choice in choices if not (choice.delta and zero_stage == 3)]
        return (NATIVE, *fitting)

    def keeps(self, copy: str) -> bool:
        """Return whether nodes may keep the secondary copy ``copy``: if ``zero`` has its codecs.

        An exact copy needs ``stepcode``; a copy of 8 bits needs ``blockint`` at 8 bits as well.
        """
        allowed = dict(self.allowed).get("zero", ())
        wanted = [] if copy == "native" else [COPIES["exact"], COPIES[copy]]
        return all(choice in allowed for choice in wanted)

    def acts(self, name: Dimension) -> bool:
        """Return whether the dimension may have a codec."""
        return bool(dict(self.allowed).get(name))

    def inside(self, choices: Iterable[Choice]) -> Iterator[Choice]:
        """Yield the ``choices`` of ``dp`` that may go with encoded sums inside of sites.

        The budget has to allow the codec of these sums (``INSIDE``) for ``dp``, and the choice has
        to be a lossy codec of fixed bits: an error bound does not cover the sums inside sites.
        """
        allowed = dict(self.allowed).get("dp", ())
        if not any(dict(choice.setting) == INSIDE for choice in allowed):
            return
        for choice in choices:
            codec = choice.codec
            if codec is not None and not codec.lossless and not codec.bounded:
                yield replace(choice, inside=True)

    def priced(
        self, is_known: Callable[[Dimension, Choice], bool]
    ) -> tuple[AllowedChoices, list[str]]:
        """Return this budget without choices of unknown cost, and the names of their codecs.

        Raises ConfigError where a dimension in ``insisted`` would lose all its choices.
        """
        left: list[tuple[Dimension, tuple[Choice, ...]]] = []
        dropped: list[str] = []
        for name, choices in self.allowed:
            kept = tuple(choice for choice in choices if is_known(name, choice))
            gone = [str(choice) for choice in choices if choice not in kept]
            if gone and not kept and name in self.insisted:
                raise ConfigError(
                    f"budget.{name}", ", ".join(gone),
                    "the cluster's file has no figure for it; measure it again, describe it under "
                    '"codecs", or leave that codec out of the budget',
                )  # fmt: skip
            dropped += [_family(choice) for choice in choices if choice not in kept]
            left.append((name, kept))
        return replace(self, allowed=tuple(left)), sorted(set(dropped))


def _family(choice: Choice) -> str:
    """Return the name of the codec whose measurement gives the cost of ``choice``."""
    codec = choice.codec
    if isinstance(codec, Bounded):
        return "radix" if codec.family == AUTO else codec.family
    return "none" if codec is None else codec.name


def _short(value: Allowed) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _allowed(dimension: Dimension, value: Allowed) -> tuple[Choice, ...]:
    """Read a dimension's choices, native excluded. Raises ConfigError."""
    if isinstance(value, str):
        if value not in NAMES:
            raise ConfigError(
                f"budget.{dimension}", value,
                f"expected {', '.join(NAMES)}, an error bound or settings as a block writes them",
            )  # fmt: skip
        return _named(dimension, value)
    if isinstance(value, float | int) and not isinstance(value, bool):
        return (*_named(dimension, "lossless"), *_bounded(dimension, float(value)))
    settings: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for setting in settings:
        if not isinstance(setting, Mapping):
            todo = f"expected {', '.join(NAMES)}, an error bound, settings or a list of settings"
            raise ConfigError(f"budget.{dimension}", value, todo)
    return tuple(_usable(dimension, setting) for setting in settings)


def _named(dimension: Dimension, name: str) -> tuple[Choice, ...]:
    if name == "native":
        return ()
    lossless = LOSSLESS + (LOSSLESS_DELTA if ROWS[dimension].sends_deltas else ())
    if name == "lossless":
        return lossless
    gradients = BITS_4 if ROWS[dimension].keeps_residuals else ()
    deltas = BITS_4_DELTA if ROWS[dimension].sends_deltas else ()
    return (*lossless, *BITS_8, *gradients, *deltas)


def _bounded(dimension: Dimension, bound: float) -> tuple[Choice, ...]:
    """Return the choices within ``bound``: the fewest bits, and a fixed size where possible."""
    fed_back = ROWS[dimension].keeps_residuals and bound > FEEDBACK_FROM
    feedback = {"error_feedback": True} if fed_back else {}
    found = [_usable(dimension, {"error_bound": bound, **feedback})]
    with contextlib.suppress(ConfigError):  # 8 bits cannot keep the bound: only the first choice
        found.append(_usable(dimension, {"codec": "blockint", "error_bound": bound, **feedback}))
    return tuple(found)


def _usable(dimension: Dimension, setting: Mapping[str, Any]) -> Choice:
    """Check a setting by parsing it in a block. Raises the block's ConfigError."""
    from hybridcomp.config import CompressionConfig

    CompressionConfig.parse({dimension: dict(setting)})
    return Choice.of(setting)
