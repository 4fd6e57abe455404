"""The cost model of a measured training, fitted to some cells and checked on the others.

    step = base * compute + slowdown * max(0, bytes / rate - overlap * compute)
         + coding * codec seconds + round * rounds

``compute`` is the step of native bf16 without limit, measured in the same turns; ``base`` which
share of it is left where the copying of its messages is counted as wire; ``slowdown`` says how much
longer a layout's wire takes than bytes / rate; ``overlap`` which share of the compute hides
communication; ``coding`` how much of the ledger's seconds of a rank lengthens the step; ``round``
what an encoded message costs beside its bytes. A cell is a row of ``docs/results/speed.json``; what
the fit finds calibrates the planner where nobody has measured the machine itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridcomp.plan.algorithms.timeline import Task, Timeline, simulate
from hybridcomp.plan.cost.prices import Calibration

Cell = dict[str, Any]
#: the arm that every other one is held against, and what the names of fp32 arms begin with
REFERENCE, FP32 = "native bf16", "fp32 "
#: arms that the model is fitted to, at the lowest and the highest r; every other cell is held out
FITTED_ARMS = (REFERENCE, "recommended", "naive-zfp")
OVERLAPS = tuple(n / 20 for n in range(11))


@dataclass(frozen=True)
class Model:
    """Fitted constants."""

    base: dict[str, float]  # layout -> share of the measured compute
    slowdown: dict[str, float]  # layout -> factor
    coding: float
    round: float  # seconds
    overlap: float

    def seconds(self, cell: Cell) -> float:
        """Of a step."""
        layouts = list(self.base)
        factors = [*self.base.values(), *self.slowdown.values(), self.coding, self.round]
        return float(np.dot(_terms(cell, layouts, self.overlap), factors))

    def timeline(self, cell: Cell) -> Timeline:
        """The step as the simulator sees it: a device, a link that begins while it still computes.

        It takes ``seconds(cell)`` wherever the compute is longer than the part that overlaps.
        """
        layout, compute = cell["layout"], float(cell["compute_s"])
        behind = self.slowdown[layout] * self.overlap * compute
        coding = self.coding * float(cell["codec_s"]) + self.round * float(cell["rounds"])
        return simulate({
            0: Task("device", self.base[layout] * compute - behind),
            1: Task("device", behind, (0,)),
            2: Task("link", self.slowdown[layout] * wire_seconds(cell), (0,)),
            3: Task("device", coding, (1, 2)),
        })  # fmt: skip

    def calibration(self) -> Calibration:
        """The constants for machines that nobody measured; codecs there are told as they are."""
        return Calibration(self.overlap, 1.0, statistics.median(self.slowdown.values()))


def wire_seconds(cell: Cell) -> float:
    """Bytes of the node that sends most over the rate of its link."""
    return 8e6 * float(cell["sent_MB"]) / float(cell["rate"])


def usable(rows: Sequence[Cell]) -> list[Cell]:
    """Rows of bench_training.json that the model is about: shaped links, layouts with several r.

    fp32 computes at another speed, and the peers are eager torch without seconds of coding.
    """
    found = [
        row for row in rows
        if "failed" not in row and not row["arm"].startswith(("native fp32", FP32))
        and not row["arm"].startswith(("peer", "ZeRO++")) and row["r"] is not None
    ]  # fmt: skip
    several = {
        layout for layout in {row["layout"] for row in found}
        if len({row["r"] for row in found if row["layout"] == layout}) > 1
    }  # fmt: skip
    return [row for row in found if row["layout"] in several]


def split(rows: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Cells to fit to, the lowest and the highest r of some arms; and all others."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["layout"], []).append(row["r"])
    fitted: list[Cell] = []
    held: list[Cell] = []
    for row in rows:
        ends = ratios[row["layout"]]
        chosen = row["arm"] in FITTED_ARMS and row["r"] in (min(ends), max(ends))
        (fitted if chosen else held).append(row)
    return fitted, held


def fit(rows: Sequence[Cell]) -> Model:
    """Least squares of relative errors, nothing below zero. Raises ValueError with too few rows."""
    layouts = sorted({row["layout"] for row in rows})
    needed = 2 * len(layouts) + 3
    if len(rows) < needed:
        raise ValueError(
            f"expected at least {needed} cells to fit {needed - 1} constants to, found "
            f"{len(rows)}; measure {' and '.join(FITTED_ARMS)} at two r or more"
        )
    measured = np.array([row["seconds"] for row in rows])
    best: tuple[float, Model] | None = None
    for overlap in OVERLAPS:
        table = np.array([_terms(row, layouts, overlap) for row in rows])
        found = non_negative(table / measured[:, None], np.ones(len(rows)))
        base = dict(zip(layouts, map(float, found), strict=False))
        slowdown = dict(zip(layouts, map(float, found[len(layouts) :]), strict=False))
        model = Model(base, slowdown, float(found[-2]), float(found[-1]), overlap)
        error = float(np.mean([errors(model, [row])[0] ** 2 for row in rows]))
        if best is None or error < best[0] - 1e-12:
            best = error, model
    assert best is not None
    return best[1]


def _terms(row: Cell, layouts: Sequence[str], overlap: float) -> list[float]:
    """What the constants are multiplied with: compute and wire by layout, coding, rounds."""
    compute = float(row["compute_s"])
    wire = max(0.0, wire_seconds(row) - overlap * compute)
    own = [float(row["layout"] == name) for name in layouts]
    parts = [*(compute * one for one in own), *(wire * one for one in own)]
    return [*parts, float(row["codec_s"]), float(row["rounds"])]


def non_negative(table: NDArray[Any], goal: NDArray[Any]) -> NDArray[Any]:
    """Least squares without negative unknowns: the most negative one is set to zero, again."""
    kept = list(range(table.shape[1]))
    while True:
        found = np.linalg.lstsq(table[:, kept], goal, rcond=None)[0]
        if not len(found) or found.min() >= 0:
            whole = np.zeros(table.shape[1])
            whole[kept] = found
            return whole
        del kept[int(found.argmin())]


def errors(model: Model, rows: Sequence[Cell]) -> list[float]:
    """Relative errors of the model, signed."""
    return [model.seconds(row) / row["seconds"] - 1 for row in rows]


def report(model: Model, fitted: Sequence[Cell], held: Sequence[Cell]) -> dict[str, Any]:
    """Constants and errors, for JSON; the largest error of a held-out cell is named."""
    found: dict[str, Any] = {"model": asdict(model), "fitted_cells": len(fitted)}
    for name, rows in (("fitted", fitted), ("held_out", held)):
        if rows:
            sizes = np.abs(errors(model, rows))
            worst = rows[int(sizes.argmax())]
            found[name] = {
                "cells": len(rows),
                "mean": float(sizes.mean()),
                "p90": float(np.quantile(sizes, 0.9)),
                "worst": float(sizes.max()),
                "within_15_percent": int((sizes <= 0.15).sum()),
                "worst_cell": f"{worst['layout']}, r {worst['r']}, {worst['arm']}",
            }
    return found
