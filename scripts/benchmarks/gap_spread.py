#!/usr/bin/env python3
"""Measure on CPUs how far the gaps of seeds lie apart, and by what that falls.

gap_spread.py --data data/text --out runs/gap_spread          # all settings, hours on two cores
gap_spread.py --out runs/gap_spread --tables                  # of what is there

Trains pairs of small models with gpu_losses.py --cpu, one setting after the other, and goes on
where it was cut off. The tables hold, by setting, the spread of the gap (standard deviation over
the seeds) by the mean of the evaluations in the last fifth, by the last evaluation and by the
training losses of the last 20 steps; then that of the training losses on the way; how the spread
changes with fewer evaluations and less text; what that says of 124 M parameters, from the seeds in
docs/results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from gpt.loop import LAST

from benchmarks import gpu_losses
from benchmarks.training_bench import loss_gaps, loss_records
from benchmarks.training_bench.gpu_losses import BASELINE, Method
from benchmarks.training_bench.loss_gaps import Array, Found
from hybridcomp.tools.compare.report import markdown_rows
from hybridcomp.tools.compare.statistics import running_mean

ROOT = Path(__file__).resolve().parents[2]
EIGHT, SIX, FOUR = (tuple(map(str, range(n))) for n in (8, 6, 4))


def _setting(
    model: str, samples: int, lr: str, warmup: str, seeds: tuple[str, ...], *more: str
) -> tuple[str, ...]:
    """Return the options of gpu_losses.py."""
    return (
        "--model", model, "--samples", str(samples), "--lr", lr, "--warmup", warmup, *more,
        "--seeds", *seeds,
    )  # fmt: skip


#: folder -> options; in all of them 400 steps and five evaluations
SETTINGS: dict[str, tuple[str, ...]] = {
    "tiny.1024.1e-3": _setting("tiny", 16, "1e-3", "log", SIX),
    "tiny.256.2e-3": _setting("tiny", 4, "2e-3", "log", SIX),
    "tiny.2048.2e-3": _setting("tiny", 32, "2e-3", "log", SIX),
    "tiny.256.3e-3": _setting("tiny", 4, "3e-3", "log", EIGHT),
    "tiny.1024.3e-3": _setting("tiny", 16, "3e-3", "log", SIX),
    "tiny.256.2e-3.linear": _setting("tiny", 4, "2e-3", "linear", SIX),
    "tiny.2048.2e-3.linear": _setting("tiny", 32, "2e-3", "linear", SIX),
    "tiny.1024.3e-3.linear": _setting("tiny", 16, "3e-3", "linear", SIX),
    "tiny.1024.3e-3.constant": _setting(
        "tiny", 16, "3e-3", "linear", SIX, "--schedule", "constant"
    ),
    "0.85M.512.1e-3": _setting("0.85M", 2, "1e-3", "log", FOUR),
    "0.85M.512.1e-3.linear": _setting("0.85M", 2, "1e-3", "linear", FOUR),
}
COMMON = ("--cpu", "--steps", "400", "--evaluations", "5", "--eval-tokens", "32768")
ARM = "recommended"
#: tokens a step of the seeds in gpu.json, and what is aimed at now
BEFORE, NOW = 2048, 16384


@dataclass(frozen=True)
class Setting:
    """The pairs of one setting: gaps in percent."""

    method: Method
    found: Found
    training: Array  # (seeds, steps): by the training losses of the last LAST steps until each

    def __str__(self) -> str:
        method = self.method
        constant = ", constant" if method.schedule == "constant" else ""
        tokens = f"{method.tokens_per_step:,} tokens"
        return f"{method.model}, {tokens}, {method.lr:g}, {method.warmup}{constant}"

    @property
    def curves(self) -> Array:
        """Return the gaps at the evaluations: (seeds, evaluations)."""
        return np.array([one.curve for one in self.found.seeds])

    @classmethod
    def of(cls, folder: Path) -> Setting | None:
        """Read what gpu_losses.py left; None where fewer than two seeds have both trainings."""
        runs = loss_records.by_arm(loss_records.kept(folder, print))
        native, own = runs.get(BASELINE, {}), runs.get(ARM, {})
        seeds = sorted(set(native) & set(own))
        if len(seeds) < 2:
            return None
        means = [
            running_mean(np.array([_losses(run[seed]["log"]) for seed in seeds]), LAST)
            for run in (native, own)
        ]
        gaps = 100 * (means[1] / means[0] - 1)
        method = Method(**native[seeds[0]]["method"])
        return cls(method, loss_gaps.of(native, own), gaps)


def _losses(log: Sequence[Mapping[str, float]]) -> list[float]:
    return [line["loss"] for line in log if "step" in line]


def by_setting(settings: Sequence[Setting]) -> list[str]:
    """Return the table of the settings."""
    rows = [["model", "tokens a step", "learning rate", "warm-up", "seeds", "gap %", "spread %",
        "last evaluation", "last 20 training losses", "of it evaluation"]]  # fmt: skip
    for one in settings:
        found, method = one.found, one.method
        rate = f"{method.lr:g}{'' if method.schedule == 'linear' else f', {method.schedule}'}"
        rows.append([
            method.model, f"{method.tokens_per_step:,}", rate, method.warmup,
            str(len(found.seeds)),
            f"{found.gap:+.3f} ± {found.half:.3f}", f"{found.spread:.3f}",
            f"{one.curves[:, -1].std(ddof=1):.3f}", f"{one.training[:, -1].std(ddof=1):.3f}",
            f"{found.evaluation:.1%}",
        ])  # fmt: skip
    return list(markdown_rows(rows))


def by_reading(settings: Sequence[Setting]) -> list[str]:
    """Return the table of spreads with fewer evaluations and less text, over that with all."""
    most = min(one.curves.shape[1] for one in settings)
    counts, parts = (1, 2, 3), (4, 16)
    last = [f"last {count} of {most} evaluations" for count in counts]
    rows = [["", *last, *(f"1/{part} of the text" for part in parts)]]
    for one in settings:
        spreads = [one.curves[:, -count:].mean(1).std(ddof=1) for count in counts]
        spreads += [with_less_text(one.found, part) for part in parts]
        rows.append([str(one), *(f"{spread / one.found.spread:.2f}" for spread in spreads)])
    return list(markdown_rows(rows))


def by_step(settings: Sequence[Setting]) -> list[str]:
    """Return the table of the spread of training losses on the way: where the two part."""
    steps = [20, 40, 60, 100, 200, 400]
    rows = [["", *(f"step {step}" for step in steps)]]
    for one in settings:
        spreads = one.training.std(0, ddof=1)
        there = [f"{spreads[n - 1]:.3f}" if n <= len(spreads) else "-" for n in steps]
        rows.append([str(one), *there])
    return list(markdown_rows(rows))


def with_less_text(found: Found, parts: int) -> float:
    """Return the spread by ``1 / parts`` of the batches, the root mean square over the parts."""
    table = np.stack([one.batches for one in found.seeds])
    pieces = [table[:, start::parts].mean(1).var(ddof=1) for start in range(parts)]
    return math.sqrt(float(np.mean(pieces)))


def exponents(settings: Sequence[Setting]) -> Iterator[tuple[str, float]]:
    """Yield, for settings that differ in tokens a step alone, by which power of them it falls."""
    groups: dict[tuple[str, float, str, str], list[Setting]] = {}
    for one in settings:
        method = one.method
        key = method.model, method.lr, method.warmup, method.schedule
        groups.setdefault(key, []).append(one)
    for (model, rate, warmup, _), own in groups.items():
        if len({one.method.tokens_per_step for one in own}) > 1:
            x = np.log([one.method.tokens_per_step for one in own])
            y = np.log([one.found.spread for one in own])
            yield f"{model} at {rate:g}, {warmup}", -float(np.polyfit(x, y, 1)[0])


def predicted(settings: Sequence[Setting], gaps: Sequence[float]) -> list[str]:
    """Say how many seeds of 124 M parameters an interval of AIM takes, by these exponents.

    ``gaps``: of its seeds at BEFORE tokens a step, in percent.
    """
    before = float(np.std(gaps, ddof=1))
    aim = loss_gaps.AIM
    lines = [
        f"124 M parameters at {BEFORE:,} tokens a step: spread {before:.2f} % over {len(gaps)} "
        f"seeds; an interval of {aim:g} % takes {loss_gaps.seeds_for(before, aim)} seeds."
    ]
    for name, power in exponents(settings):
        spread = before * (BEFORE / NOW) ** power
        lines.append(
            f"* {name}: the spread falls with the tokens a step to the power {power:.2f}; at "
            f"{NOW:,} that makes {spread:.2f} % and {loss_gaps.seeds_for(spread, aim)} seeds."
        )
    return lines


def tables(out: Path) -> list[str]:
    """Return all tables of what is below ``out``."""
    found = [Setting.of(out / name) for name in SETTINGS]
    settings = [one for one in found if one is not None]
    if not settings:
        raise SystemExit(f"gap_spread: {out}: no setting has two seeds; train them first")
    figures = json.loads((ROOT / "docs/results/gpu.json").read_text())["loss"]["runs"]
    gaps = next(run["gaps"] for run in figures if run["label"] == ARM)
    return [
        *by_setting(settings), "", *by_step(settings), "", *by_reading(settings), "",
        *predicted(settings, gaps),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of the first setting that did not end well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/gap_spread"), metavar="FOLDER")
    add("--only", nargs="+", choices=list(SETTINGS), metavar="NAME", default=list(SETTINGS))
    add("--tables", action="store_true", help="train nothing")
    asked = parser.parse_args(arguments)
    for name in () if asked.tables else asked.only:
        words = [*COMMON, *SETTINGS[name], "--data", str(asked.data)]
        if status := gpu_losses.main([*words, "--out", str(asked.out / name)]):
            return status
    print("\n".join(tables(asked.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
