"""Check the fields of a layout that the user has fixed (``--fix``)."""

from __future__ import annotations

from typing import Any, get_args

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.layout import DEGREES, ContextWay, Copy, Frozen, Layout, Sums

SWITCHES = ("sequence", "offload", "stays")
#: fields that nobody may fix: they follow from a graph's cuts, ``ratio`` and the hosts' memory
DERIVED = {"nodes", "sub_group", "drive"}
_KINDS: dict[str, Any] = {
    "context_way": ContextWay, "copy": Copy, "frozen": Frozen, "accumulate": Sums,
}  # fmt: skip


def check(name: str, value: Any) -> None:
    """Raise ConfigError unless the field ``name`` of a layout can have ``value``."""
    known = sorted(set(Layout.__dataclass_fields__) - DERIVED)
    if name not in known:
        raise ConfigError(f"fixed.{name}", value, f"expected one of {', '.join(known)}")
    expected = _unfit(name, value)
    if expected:
        raise ConfigError(f"fixed.{name}", value, f"expected {expected}")


def _unfit(name: str, value: Any) -> str:
    """Return the allowed values of the field ``name``, in words; "" if ``value`` is allowed."""
    if name in DEGREES:
        return "" if _is_whole(value) and value >= 1 else "a whole number of 1 or more"
    if name in SWITCHES:
        return "" if value in (True, False) else "true or false"
    if name == "hierarchy":
        pair = isinstance(value, list | tuple) and len(value) == 2
        fits = value in (True, False) or (pair and all(_is_whole(one) and one > 1 for one in value))
        return "" if fits else "true, false, or ranks of a node and nodes of a site, such as [8, 4]"
    if name == "zero_stage":
        return "" if _is_whole(value) and value in range(4) else "0, 1, 2 or 3"
    if name in _KINDS:
        kinds = get_args(_KINDS[name])
        return "" if value in kinds else " or ".join(f'"{kind}"' for kind in kinds)
    if name == "ratio":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "" if is_number and 0 <= value <= 1 else "a share from 0 to 1"
    numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
    if name == "recompute":
        return "" if all(map(_is_segment, numbers)) else "segments of layers, such as [[1, 3]]"
    least = 0 if name in ("cuts", "knobs") else 1
    fits = all(_is_whole(one) and one >= least for one in numbers)
    return "" if fits else f"numbers of {least} or more, such as [3, 2]"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_segment(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(map(_is_whole, value)) and 0 <= value[0] < value[1]
