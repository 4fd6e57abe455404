"""Table and picture of what segment_study.py left: a file for each run, its name the case."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NATIVE = "native_fp32"
_NAME = re.compile(r"(?P<bits>[\d.]+)_(?P<segment>\d+|tensor)_seed(?P<seed>\d+)")


@dataclass(frozen=True)
class Row:
    """One length of a segment at one number of bits, over all seeds of the native run."""

    bits: float  # that the bound was chosen for
    segment: str
    bound: float
    measured: float  # bits a value over the whole runs, with everything that travels
    gaps: tuple[float, ...]  # per cent of the native loss, by seed, the last tenth of the steps
    curve: NDArray[np.float64]  # the same at every step, mean of the seeds


def rows_of(folder: Path) -> tuple[list[Row], int, list[int]]:
    """Rows, steps and seeds. Raises FileNotFoundError where a seed of the native run is missing."""
    seeds = sorted(int(file.stem.rpartition("seed")[2]) for file in folder.glob(f"{NATIVE}_seed*"))
    if not seeds:
        raise FileNotFoundError(f"{folder}: no {NATIVE}_seed*.json")
    native = [_read(folder, NATIVE, seed) for seed in seeds]
    names = (_NAME.fullmatch(file.stem) for file in folder.glob("*.json"))
    cases = {(match["bits"], match["segment"]) for match in names if match}
    rows = [_row(folder, *case, seeds, native) for case in sorted(cases, key=_order)]
    return rows, native[0]["steps"], seeds


def _order(case: tuple[str, str]) -> tuple[float, float]:
    bits, segment = case
    return -float(bits), float("inf") if segment == "tensor" else float(segment)


def _read(folder: Path, name: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}_seed{seed}.json").read_text())
    return found


def _row(folder: Path, bits: str, segment: str, seeds: list[int], native: list[Any]) -> Row:
    runs = [_read(folder, f"{bits}_{segment}", seed) for seed in seeds]
    last = max(1, native[0]["steps"] // 10)
    own, other = (_means([run["losses"] for run in found], last) for found in (runs, native))
    gaps = 100 * (own / other - 1)
    return Row(
        float(bits), segment, runs[0]["bound"], statistics.mean(run["bits"] for run in runs),
        tuple(gaps[:, -1].tolist()), gaps.mean(0),
    )  # fmt: skip


def _means(losses: list[list[float]], window: int) -> NDArray[np.float64]:
    """(seeds, steps - window + 1): means of ``window`` consecutive steps."""
    weights = np.ones(window) / window
    return np.array([np.convolve(row, weights, "valid") for row in losses])


def chapter(folder: Path, out: Path) -> str:
    """The chapter in Markdown, with ``segments.png`` in ``out``. Raises FileNotFoundError."""
    rows, steps, seeds = rows_of(folder)
    draw(rows, steps, out / "segments.png")
    last = max(1, steps // 10)
    head = f"""\
The bound of an element is relative to the largest value of its segment: shorter segments follow the
scale of the values more closely, and every one of them costs a few bytes. Gradients of the example
GPT, two replicas, error feedback, the bound of each length chosen for equal bits; {steps} steps,
seeds {", ".join(map(str, seeds))}. Gaps are per cent of the native loss over the last {last} steps.
`tensor`, one step for a whole parameter, is no setting; it is here for comparison.

![loss over native, by length of the segment](segments.png)

| bits | segment | bound | measured bits | gap % | by seed |
|---|---|---|---|---|---|"""
    lines = [
        f"| {row.bits:g} | {row.segment} | {row.bound:.4g} | {row.measured:.2f} | "
        f"{statistics.mean(row.gaps):+.2f} | {', '.join(f'{gap:+.2f}' for gap in row.gaps)} |"
        for row in rows
    ]
    tail = f"""
```
scripts/prepare_data.py --output data/text
scripts/studies/segment_study.py --steps {steps} --seeds {" ".join(map(str, seeds))}
scripts/bench/results.py --segments runs/segment_study
```"""
    return "\n".join([head, *lines, tail])


def draw(rows: list[Row], steps: int, picture: Path) -> None:
    """The gap over the steps, one panel for each number of bits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    each = list(dict.fromkeys(row.bits for row in rows))
    figure, panels = pyplot.subplots(
        1, len(each), figsize=(5 * len(each), 4), squeeze=False, layout="constrained"
    )
    for axes, bits in zip(panels[0], each, strict=True):
        for row in rows:
            if row.bits == bits:
                first = steps - len(row.curve) + 1
                axes.plot(np.arange(first, steps + 1), row.curve, label=row.segment)
        axes.axhline(0, color="grey", lw=1)
        axes.set(title=f"{bits:g} bits a value", xlabel="step", ylabel="loss over native, %")
        axes.legend(title="segment")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)
