"""Seconds of codecs by setting, dtype and direction, as a cluster's rows have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.machines.estimates import Curve, curves
from hybridcomp.tools.plan.machines.rows import Beside, Coding, Direction


def coded(rows: Iterable[Coding]) -> dict[tuple[Any, ...], Curve]:
    """Return curves through ``rows``, one for each setting, dtype, direction and ``beside``."""
    return curves(
        ((row.setting, row.dtype, row.direction, row.beside), row.numel, row.seconds)
        for row in rows
    )


def coding_of(
    table: Mapping[tuple[Any, ...], Curve], setting: str, dtype: str, direction: Direction
) -> dict[tuple[str, Beside], Curve]:
    """Find the curves of a setting, else of its codec's other settings; by setting and ``beside``.

    Raises HybridcompError where no setting of the codec was measured.
    """
    name = setting.partition("(")[0]
    for wanted in (direction, "decode"):
        for exact in (True, False):
            found = {
                (known, beside): curve
                for (known, kind, way, beside), curve in table.items()
                if kind in (dtype, "any") and way == wanted
                and (known == setting if exact else known.partition("(")[0] == name)
            }  # fmt: skip
            if found:
                return found
    listed = ", ".join(sorted({key[0] for key in table})) or "none"
    raise HybridcompError(
        f"the cluster has no figure for {setting} of {dtype} ({direction}); it has: {listed}; "
        "measure it again, describe it, or leave that codec out of the budget"
    )
