"""A setting that moves over the first steps: from a mild one to the one that stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field
from pydantic_core import PydanticCustomError

from hybridcomp.codecs.base import Codec
from hybridcomp.config.codec_settings import Strict
from hybridcomp.config.error_messages import problem
from hybridcomp.policy import Rung

#: most values that a ramp takes before its end: ranks and readers see few codecs
LEVELS = 8
#: settings that can move; the first that a codec has. True: larger is milder
MOVES: tuple[tuple[str, bool], ...] = (("error_bound", False), ("bits", True), ("rate", True))
#: zfp takes whole bits for a block of 4 values
RATE_STEP = 0.25


class RampConfig(Strict):
    """A setting that starts mild and reaches its value after some steps."""

    start: float = Field(
        alias="from",
        gt=0,
        allow_inf_nan=False,
        description="What `error_bound` (smaller), or `bits` of blockint or `rate` of zfp "
        "(larger), is at first. At most 8 levels: bounds in equal ratios, the others evenly.",
    )
    steps: int = Field(
        ge=1, description="Optimizer steps after `start_step` until the setting has its value."
    )


def moving(settings: Mapping[str, Any]) -> str | None:
    """The setting of a codec that a ramp moves, None where it has none written."""
    return next((name for name, _ in MOVES if name in settings), None)


def values(name: str, start: float, end: float) -> list[float]:
    """What a ramp takes before ``end``, mildest first: bounds in equal ratios, others evenly."""
    if name == "error_bound":
        return [float(f"{start * (end / start) ** (i / LEVELS):.3g}") for i in range(LEVELS)]
    unit = 1.0 if name == "bits" else RATE_STEP
    levels = min(LEVELS, round((start - end) / unit))
    return [start - round(i * (start - end) / levels / unit) * unit for i in range(levels)]


def rungs(
    settings: Mapping[str, Any],
    start: float,
    steps: int,
    build: Callable[[Mapping[str, Any]], Codec | None],
) -> tuple[Rung, ...]:
    """The codecs of a ramp of ``steps`` steps, each with the step that it ends before.

    ``settings``: of the codec that stays. Raises the error that pydantic turns into a
    ValidationError, at ``ramp.from``.
    """
    name = moving(settings)
    assert name is not None
    end, larger = settings[name], dict(MOVES)[name]
    if start == end or (start > end) != larger:
        side = "above" if larger else "below"
        todo = f"a ramp starts mild: expected a number {side} {name}, which is {end:g}; correct it"
        raise problem("ramp.from", start, todo)
    if name == "bits" and start != int(start):
        raise problem("ramp.from", start, "bits are whole; correct it")
    taken = values(name, start, end)
    found = []
    for index, value in enumerate(taken):
        one = int(value) if name == "bits" else value
        try:
            codec = build({**settings, name: one})
        except PydanticCustomError as error:
            todo = (error.context or {}).get("todo", "correct it")
            raise problem("ramp.from", start, f"{name} {one:g}: {todo}") from None
        assert codec is not None
        found.append(Rung(-(-steps * (index + 1) // len(taken)), codec))
    return tuple(found)
