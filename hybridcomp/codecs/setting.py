"""Declare the settings of a codec: one ``Setting`` for each argument of its constructor.

The model of the block, its JSON schema, its errors and its ramps are made from them, so a new codec
needs no line in ``config/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from hybridcomp.errors import CodecError


@dataclass(frozen=True)
class Setting:
    """One argument of a codec's constructor, and the key of the same name in the block.

    Args:
        name: name of the argument and of the key.
        type: int, float, bool, or a ``Literal`` of strings.
        help: sentences for the schema. They begin with the name of the codec, since the schema
            joins the sentences of all codecs that have a setting of this name.
        least: smallest allowed number; None: only the constructor checks it.
        most: largest allowed number.
        ramp_step: a ramp changes the setting in multiples of this, and larger values are milder;
            None: a ramp cannot change it. A ramp changes only one setting of a codec.
        no_bound: why the codec keeps no bound with this setting, as the end of a sentence that
            begins with the value; "" if it keeps one.
        beside: names of other settings, and the values that they must have for this one to apply;
            a ramp or preset that gives them other values drops this setting.
    """

    name: str
    type: Any
    help: str
    least: float | None = None
    most: float | None = None
    ramp_step: float | None = None
    no_bound: str = ""
    beside: tuple[tuple[str, Any], ...] = ()

    def fits(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the written ``settings`` have the values that this one requires."""
        return all(settings.get(name, value) == value for name, value in self.beside)

    def check(self, codec: str, value: object) -> None:
        """Raise CodecError, naming ``codec``, unless ``value`` has the type and is in range."""
        if not self._takes(value):
            raise CodecError(f"{codec}: {self.name} must be {self._expected()}, found {value!r}")

    def _takes(self, value: object) -> bool:
        if self.type is bool:
            return isinstance(value, bool)
        if get_origin(self.type) is Literal:
            return value in get_args(self.type)
        allowed = int if self.type is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            return False
        least = float("-inf") if self.least is None else self.least
        return least <= value <= (float("inf") if self.most is None else self.most)

    def _expected(self) -> str:
        if self.type is bool:
            return "true or false"
        if get_origin(self.type) is Literal:
            return f"one of {get_args(self.type)}"
        kind = "an integer" if self.type is int else "a number"
        start = "" if self.least is None else f" from {self.least:g}"
        stop = "" if self.most is None else f" to {self.most:g}"
        return f"{kind}{start}{stop or ' up' * bool(start)}"
