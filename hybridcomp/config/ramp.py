"""Change a setting over the first steps, from a mild value to the written value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field
from pydantic_core import PydanticCustomError

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import CODECS, without_misfits
from hybridcomp.codecs.setting import Setting
from hybridcomp.config.codec_settings import AtLeastOne, Positive, Strict
from hybridcomp.config.error_messages import problem
from hybridcomp.config.policy import Rung

#: most codecs of a ramp before its final codec
RUNGS = 8
#: the setting that every ramp may change; smaller bounds are milder, larger codec settings milder
BOUND = "error_bound"


def _of_codecs() -> str:
    """List the codec settings that a ramp may change."""
    return " or ".join(
        f"`{setting.name}` of {codec.name}"
        for codec in CODECS.values()
        for setting in codec.settings
        if setting.ramp_step is not None
    )


class RampConfig(Strict):
    """A setting that starts at a mild value and reaches its written value after some steps."""

    start: Positive = Field(
        alias="from",
        description=f"What `error_bound` (smaller), or {_of_codecs()} (larger), is at first. At "
        f"most {RUNGS} settings: bounds in equal ratios, the others evenly.",
    )
    steps: AtLeastOne = Field(
        description="Optimizer steps after `start_step` until the setting has its value."
    )


def movable() -> tuple[str, ...]:
    declared = (setting for codec in CODECS.values() for setting in codec.settings)
    return tuple(dict.fromkeys([BOUND, *(s.name for s in declared if s.ramp_step is not None)]))


def moving(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the written setting that a ramp changes; None if there is none."""
    if BOUND in settings:
        return BOUND
    codec = CODECS.get(settings.get("codec", ""))
    declared = () if codec is None else codec.settings
    movable = (s.name for s in declared if s.ramp_step is not None)
    return next((name for name in movable if name in settings), None)


def _declared(settings: Mapping[str, Any], name: str) -> Setting | None:
    """Return the declaration of the setting ``name`` of the written codec; None for a bound."""
    if name == BOUND:
        return None
    return next(s for s in CODECS[settings["codec"]].settings if s.name == name)


def values(start: float, end: float, step: float | None) -> list[float]:
    """Return the values of a ramp before ``end``, mildest first, in multiples of ``step``.

    ``step`` None: the setting is an error bound, which changes by equal ratios.
    """
    if step is None:
        return [float(f"{start * (end / start) ** (i / RUNGS):.3g}") for i in range(RUNGS)]
    rungs = min(RUNGS, round((start - end) / step))
    return [start - round(i * (start - end) / rungs / step) * step for i in range(rungs)]


def rungs(
    settings: Mapping[str, Any],
    start: float,
    steps: int,
    build: Callable[[Mapping[str, Any]], Codec | None],
) -> tuple[Rung, ...]:
    """Build the codecs of a ramp of ``steps`` steps, each with the first step after its use.

    ``settings``: settings of the final codec. Raises the error that pydantic turns into a
    ValidationError, at ``ramp.from``.
    """
    name = moving(settings)
    assert name is not None
    setting = _declared(settings, name)
    whole = setting is not None and setting.type is int
    _check_start(name, start, settings[name], larger=setting is not None)
    if whole and start != int(start):
        raise problem("ramp.from", start, f"{name} are whole")
    taken = values(start, settings[name], None if setting is None else setting.ramp_step)
    built = []
    for index, value in enumerate(taken):
        moved = int(value) if whole else value
        try:
            codec = build(without_misfits({**settings, name: moved}, ()))
        except PydanticCustomError as error:
            todo = (error.context or {}).get("todo", error.message())
            raise problem("ramp.from", start, f"{name} {moved:g}: {todo}") from None
        assert codec is not None
        built.append(Rung(-(-steps * (index + 1) // len(taken)), codec))
    return tuple(built)


def _check_start(name: str, start: float, end: float, *, larger: bool) -> None:
    """Refuse a ramp that does not start mild; ``larger``: values above ``end`` are milder."""
    if start == end or (start > end) != larger:
        side = "above" if larger else "below"
        todo = f"a ramp starts mild: expected a number {side} {name}, which is {end:g}"
        raise problem("ramp.from", start, todo)
