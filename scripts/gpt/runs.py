"""Logs of runs, read back and compared: those of ``train_gpt.py --log`` and hybridcomp's ledger."""

from __future__ import annotations

import glob
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]
#: dimension -> direction -> figures
Rows = dict[str, dict[str, dict[str, Any]]]
#: two-sided 95% quantiles of Student's t, by degrees of freedom; 1.96 beyond
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
#: steps at the start that the speed leaves out
WARM_UP = 3


class RunError(ValueError):
    """A log that cannot be compared; the message names file, found and what to do."""


@dataclass(frozen=True)
class Run:
    """One way of training, once for each seed. All arrays: (seeds, steps)."""

    label: str
    files: list[Path]
    seeds: list[int | None]
    steps: NDArray[np.int64]  # (steps,)
    losses: Curve
    speeds: Curve  # tokens a second
    valid_losses: list[float | None]
    ledgers: list[Rows]  # totals of each seed's run, empty without a ledger

    def speed(self) -> float:
        """Median tokens a second over all seeds, without the first steps."""
        return float(
            np.median(self.speeds[:, WARM_UP:] if len(self.steps) > WARM_UP else self.speeds)
        )

    def ledger_rows(self) -> Rows:
        """Totals of the first seed; the bytes of the others are the same for fixed-size codecs."""
        return self.ledgers[0] if self.ledgers else {}

    def bits(self) -> str:
        """What was compressed, how much: ``dp blockint(bits=4) 7.5x, zero ...``; "" without."""
        parts = []
        for dimension, ways in self.ledger_rows().items():
            for way, row in ways.items():
                if row["codec"] != "none" and row["ratio"]:  # a group of one rank sends nothing
                    name = dimension if len(ways) == 1 else f"{dimension} {way}"
                    parts.append(f"{name} {row['codec']} {row['ratio']:.1f}x")
        return ", ".join(parts)


@dataclass(frozen=True)
class Comparison:
    """One run against the baseline."""

    label: str
    final_loss: float  # mean over seeds and the last steps
    valid_loss: float | None
    gap: float  # of the final loss to the baseline's, in percent, mean over seeds
    gap_interval: float | None  # half-width at 95%, None with one seed
    valid_gap: float | None  # of the validation loss, in percent


def read_run(label: str, files: str, ledger: str) -> Run:
    """Read the logs ``files`` (names and globs, with commas between). Raises RunError."""
    paths: list[Path] = []
    for text in files.split(","):
        found = [Path(text)] if Path(text).is_file() else sorted(map(Path, glob.glob(text)))
        if not found:
            raise RunError(f"{text}: no such log; train with --log {text}")
        paths += found
    logs = [read_log(path) for path in paths]
    steps = [record["step"] for record in logs[0].records]
    for path, log in zip(paths, logs, strict=True):
        if [record["step"] for record in log.records] != steps:
            raise RunError(
                f"{path}: has steps {_span(log)}, {paths[0]} has {_span(logs[0])}; compare runs of "
                "one length"
            )
    seeds = [log.seed for log in logs]
    if len(set(seeds)) < len(seeds) and None not in seeds:
        raise RunError(f"{label}: two logs have one seed, {seeds}; give one log for each seed")
    ledgers = [path.with_name(ledger) for path in paths]
    there = [path.is_file() for path in ledgers]
    if any(there) and not all(there):
        raise RunError(f"{ledgers[there.index(False)]}: missing, while other seeds have one")
    return Run(
        label=label,
        files=paths,
        seeds=seeds,
        steps=np.array(steps),
        losses=np.array([[r["loss"] for r in log.records] for log in logs], dtype=np.float64),
        speeds=np.array([[r["tokens_per_second"] for r in log.records] for log in logs]),
        valid_losses=[log.valid_loss for log in logs],
        ledgers=[read_ledger(path) for path in ledgers] if all(there) else [],
    )


@dataclass(frozen=True)
class LogFile:
    """One log."""

    seed: int | None
    records: list[dict[str, Any]]
    valid_loss: float | None


def read_log(path: Path) -> LogFile:
    """Header, step records and summary of a log. Raises RunError."""
    seed = valid_loss = None
    records = []
    for record in _json_lines(path):
        if "run" in record:
            seed = record["run"].get("seed")
        elif record.get("summary"):
            valid_loss = record.get("valid_loss")
        elif {"step", "loss", "tokens_per_second"} <= record.keys():
            records.append(record)
        else:
            raise RunError(
                f"{path}: expected records with step, loss and tokens_per_second, found "
                f"{sorted(record)}; give the file that train_gpt.py --log wrote"
            )
    if not records:
        raise RunError(f"{path}: holds no step; did the run fail before its first?")
    bad = [record["step"] for record in records if not math.isfinite(record["loss"])]
    if bad:
        raise RunError(f"{path}: the loss is not finite at step {bad[0]}; nothing to compare")
    return LogFile(seed, records, valid_loss)


def read_ledger(path: Path) -> Rows:
    """The totals of a run's ledger. Raises RunError when the file is cut off or another's."""
    records = _json_lines(path)
    if not records or "dimensions" not in records[-1]:
        raise RunError(f"{path}: expected hybridcomp's ledger, records with dimensions; found none")
    if not records[-1].get("summary"):
        raise RunError(f"{path}: the summary at the end is missing; did the run end early?")
    rows: Rows = records[-1]["dimensions"]
    needed = {"codec", "raw_MB", "wire_MB", "ratio"}
    for dimension, ways in rows.items():
        for way, row in ways.items():
            if not needed <= row.keys():
                raise RunError(
                    f"{path}: {dimension} {way} lacks {sorted(needed - row.keys())}; this script "
                    "and hybridcomp are of different versions"
                )
    return rows


def compare(baseline: Run, run: Run, last: int) -> Comparison:
    """Paired by seed. Raises RunError for other steps, or a seed that the baseline lacks."""
    if not np.array_equal(run.steps, baseline.steps):
        raise RunError(
            f"{run.label}: has {len(run.steps)} steps to {run.steps[-1]}, the baseline "
            f"{len(baseline.steps)} to {baseline.steps[-1]}; compare runs of one length"
        )
    order = pair(baseline, run)
    final = run.losses[:, -last:].mean(axis=1)
    reference = baseline.losses[order, -last:].mean(axis=1)
    gaps = 100 * (final / reference - 1)
    valid, valid_gap = None, None
    pairs = [(run.valid_losses[i], baseline.valid_losses[j]) for i, j in enumerate(order)]
    known = [(own, other) for own, other in pairs if own is not None and other is not None]
    if len(known) == len(pairs):
        valid = float(np.mean([own for own, _ in known]))
        valid_gap = float(np.mean([100 * (own / other - 1) for own, other in known]))
    return Comparison(
        label=run.label,
        final_loss=float(final.mean()),
        valid_loss=valid,
        gap=float(gaps.mean()),
        gap_interval=half_width(gaps),
        valid_gap=valid_gap,
    )


def pair(baseline: Run, run: Run) -> list[int]:
    """For each seed of ``run`` the baseline's run of it; by order where seeds are unknown."""
    if None in run.seeds or None in baseline.seeds:
        if len(run.seeds) != len(baseline.seeds):
            raise RunError(
                f"{run.label}: {len(run.seeds)} logs without seeds, the baseline has "
                f"{len(baseline.seeds)}; give one baseline for each"
            )
        return list(range(len(run.seeds)))
    lacking = [seed for seed in run.seeds if seed not in baseline.seeds]
    if lacking:
        raise RunError(
            f"{run.label}: the baseline has no run of seed {lacking[0]}, only of "
            f"{baseline.seeds}; train it with --seed {lacking[0]}"
        )
    return [baseline.seeds.index(seed) for seed in run.seeds]


def half_width(values: Curve) -> float | None:
    """Half of the 95% interval of the mean, by Student's t; None for one value."""
    count = len(values)
    if count < 2:
        return None
    quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else 1.96
    return float(quantile * values.std(ddof=1) / math.sqrt(count))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise RunError(
                f"{path}:{number}: expected JSON, found {text[:40]!r} ({error})"
            ) from None
        if not isinstance(record, dict):
            raise RunError(f"{path}:{number}: expected a JSON object, found {text[:40]!r}")
        found.append(record)
    return found


def _span(log: LogFile) -> str:
    return f"{log.records[0]['step']} to {log.records[-1]['step']}"
