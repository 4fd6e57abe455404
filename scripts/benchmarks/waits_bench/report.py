"""Tabulate a training's waits, native and compressed side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.shared import table
from benchmarks.training_bench.cells import REFERENCE
from benchmarks.training_bench.gpu_cells import COMPUTE
from benchmarks.waits_bench.causes import CAUSES
from benchmarks.waits_bench.lanes import CODEC, COPIES, WIRE

Figures = dict[str, Any]
#: milliseconds of a step below which the table omits a cause
LEAST_MS = 0.005


def page(found: Figures) -> str:
    """Return the page of a layout: parts of a step and causes of the gap."""
    arms, names = found["arms"], list(found["arms"])
    kind = "kernels" if arms[names[0]]["kernels"] else "operations of the CPU"
    lines = [
        f"### {found['layout']}, {found['size']} parameters", "",
        f"Means of {arms[names[0]]['steps']} recorded steps of all ranks, by their {kind}.", "",
        *_untold(arms), *_causes(arms), "", *_lanes(arms), "",
    ]  # fmt: skip
    for name, missed in found["missing"].items():
        lines += [*_missing(name, missed, found["turns"]), ""]
    return "\n".join(lines)


def _untold(arms: dict[str, Figures]) -> list[str]:
    """Name the traces that lack the records for attributing waits."""
    found = {name: arm["untold"] for name, arm in arms.items() if arm["untold"]}
    return [f"The traces of {_named(n)} do not tell {what}.\n" for n, what in found.items()]


def _causes(arms: dict[str, Figures]) -> list[str]:
    rows = []
    for cause in CAUSES:
        values = [arms[name]["causes"][cause] for name in arms]
        if max(values) >= LEAST_MS:
            rows.append([cause, *(f"{value:.2f}" for value in values)])
    rows.append(["**all**", *(f"**{arms[name]['ms']:.2f}**" for name in arms)])
    return table(["ms of a step", *map(_named, arms)], rows)


def _lanes(arms: dict[str, Figures]) -> list[str]:
    """Return how long codec, messages and copies take, overlapping computation and exposed."""
    rows = []
    for lane in (CODEC, WIRE, COPIES):
        values = [arms[name]["lanes"][lane] for name in arms]
        if max(value["ms"] for value in values) >= LEAST_MS:
            rows.append([lane, *(f"{v['beside_ms']:.2f} + {v['exposed_ms']:.2f}" for v in values)])
    return table(["busy, ms of a step: beside computation + exposed", *map(_named, arms)], rows)


def _missing(name: str, missed: Figures, turns: Figures) -> list[str]:
    """Return the time that the bytes allow, the time reached, and the causes of the rest."""
    slower = turns[name]["recorded_ms"] / turns[name]["ms"]
    said = (
        f"{_named(name)}: 1/{missed['saving']:.2f} of the bytes allows {missed['allowed']:.2f} "
        f"times native (r {missed['r']:.2f}); recorded steps reach {missed['speed_up']:.2f}, "
        f"{missed['reached']:.0%} of it, others {missed['reached_unrecorded']:.0%}. These take "
        f"{turns[name]['ms']:.1f} ms, recorded ones {slower:.2f} times as long."
    )
    if missed["saving"] < 1.01:
        said += " It sends as many bytes as native: no message of this model was compressed."
    rows = [
        (cause, f"{value:+.2f}", f"{missed['causes_percent'][cause]:+.1f}")
        for cause, value in sorted(missed["causes_ms"].items(), key=lambda item: -item[1])
        if abs(value) >= LEAST_MS
    ]
    total = 100 * (1 - missed["reached"])
    rows.append(("**all**", f"**{missed['missing_ms']:+.2f}**", f"**{total:+.1f}**"))
    return [said, "", *table(["beyond what the bytes allow", "ms", "% of the step"], rows)]


def _named(name: str) -> str:
    return name if name in (REFERENCE, COMPUTE) else f"`{name}`"


def write(found: Figures, path: Path) -> None:
    """Write the figures to ``path`` as JSON with three decimals, and the page to a .md file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(found), indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
