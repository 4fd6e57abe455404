#!/usr/bin/env python3
"""Time trainings over two sites to an equal loss: every step, or islands that meet every H steps.

    python scripts/bench/bench_sites.py                        # as root: links are made
    python scripts/bench/bench_sites.py --rates 50mbit --steps 200 --runs native islands

Two sites of two ranks (``netlab.py --layout 2x2``): ranks of a site talk through its loopback,
sites over a link of each of ``--rates``. The example (scripts/train_gpt.py, ZeRO 1) trains as many
steps in every run, from the same weights on the same data. A training that finished is not
repeated: started again, the study goes on where it was cut off.

A loss is reached where the mean of the last --window steps first has it; the loss to reach is the
highest of the runs' last ones, so that all reach it. Seconds are those of the optimizer steps, on
rank 0. All ranks share the cores of this machine, which is in every run alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.loss_study import CONFIGS, SCRIPTS, environment
from hybridcomp.compare import CompareError, launch
from hybridcomp.compare.json_lines import read_lines
from lab.layout import LabError, parse_rate

LAYOUT = "2x2"
COMMITTED = "ds_zero1_baseline.json"
ISLANDS = {"islands": 2, "codec": "blockint", "bits": 4, "error_feedback": True}
#: runs and their blocks
RUNS: dict[str, dict[str, Any] | None] = {
    "native": None,
    "every step, 4 bits": {
        "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
        "zero": {"codec": "blockint", "bits": 4, "delta": True},
        "when": "always",
    },
    "islands": {"sync": {"preset": "diloco", "every": 30, **ISLANDS}},
    "streaming": {"sync": {"preset": "streaming", "every": 30, "islands": 2}},
    "sparse": {"sync": {"preset": "sparseloco", "every": 30, "islands": 2}},
}
#: run that ratios are to, and the one whose wait for messages others hide
EVERY_STEP, PLAIN = "every step, 4 bits", "islands"
RATES = ("50mbit", "1gbit", "10gbit")


@dataclass(frozen=True)
class Curve:
    """Losses of a finished training, and the seconds to the end of each step."""

    losses: np.ndarray[Any, np.dtype[np.float64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    valid_loss: float
    wait_s: float  # for messages of meetings, of rank 0
    meetings: int
    nbytes: float  # between sites, of all ranks; 0: not counted (native)

    def smooth(self, window: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the mean of the last ``window`` losses, from step ``window`` on."""
        found: np.ndarray[Any, np.dtype[np.float64]] = np.convolve(
            self.losses, np.full(window, 1 / window), mode="valid"
        )
        return found

    def seconds_to(self, loss: float, window: int) -> float | None:
        """Return the seconds until the smooth curve first is at ``loss``; None: never."""
        reached = np.flatnonzero(self.smooth(window) <= loss)
        return float(self.seconds[reached[0] + window - 1]) if reached.size else None


def read_curve(folder: Path) -> Curve:
    """Read what a training left in its folder."""
    records = read_lines(folder / "loss.jsonl")
    steps = [record for record in records if "loss" in record and "summary" not in record]
    summary = next(record for record in records if record.get("summary"))
    ledger = folder / "ledger.jsonl"
    rows = read_lines(ledger) if ledger.exists() else []
    met = [row["sync"] for row in rows if "sync" in row and not row.get("summary")]
    dimensions = rows[-1]["dimensions"] if rows else {}
    sent = [one["inter_MB"] for found in dimensions.values() for one in found.values()]
    return Curve(
        np.array([record["loss"] for record in steps]),
        np.cumsum([record["seconds"] for record in steps]),
        float(summary["valid_loss"]),
        sum(row["meet_wait_ms"] for row in met) / 1e3,
        int(sum(row["meetings"] for row in met)),
        1e6 * sum(sent),
    )


def training(name: str, rate: str, asked: argparse.Namespace) -> launch.LaunchedTraining:
    """Return a training of the example over links of ``rate``; writes its DeepSpeed file."""
    folder: Path = asked.out / rate / name
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = json.loads((CONFIGS / COMMITTED).read_text())
    settings["train_micro_batch_size_per_gpu"] = asked.batch
    settings["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": settings["optimizer"]["params"]["lr"],
            "warmup_num_steps": max(2, asked.steps // 10),
            "total_num_steps": asked.steps,
        },
    }
    block = RUNS[name]
    if block is not None:
        settings["compression"] = launch.ledger_in(block, folder)
    config = folder / "ds_config.json"
    config.write_text(json.dumps(settings, indent=1))
    command = [
        sys.executable, str(SCRIPTS / "netlab.py"), "--layout", LAYOUT, "--rate", rate, "--quiet",
        "--", sys.executable, *(["-m", launch.MODULE] if block is not None else []),
        str(SCRIPTS / "train_gpt.py"), "--deepspeed_config", str(config),
        "--data", str(asked.data), "--steps", str(asked.steps), "--seed", str(asked.seed),
        "--print-every", "50", "--log", str(folder / "loss.jsonl"),
        "--width", str(asked.width), "--layers", str(asked.layers),
    ]  # fmt: skip
    return launch.LaunchedTraining(f"{rate} {name}", folder, command, settings, _variables(folder))


def _variables(folder: Path) -> dict[str, str]:
    """Return the environment of a rank; the lab itself names the interface of gloo."""
    found = environment(folder)
    found.pop("GLOO_SOCKET_IFNAME", None)
    return {**found, "DS_ACCELERATOR": "cpu"}


def rows_of(curves: dict[str, Curve], window: int) -> list[dict[str, Any]]:
    """Return a row for each run over one rate."""
    loss = max(float(curve.smooth(window)[-1]) for curve in curves.values())
    times = {name: curve.seconds_to(loss, window) for name, curve in curves.items()}
    plain = curves.get(PLAIN)
    rows = []
    for name, curve in curves.items():
        hidden = None
        if plain is not None and name != PLAIN and curve.meetings and plain.wait_s:
            hidden = 1 - curve.wait_s / plain.wait_s
        rows.append(
            {
                "run": name,
                "loss": float(curve.smooth(window)[-1]),
                "valid_loss": curve.valid_loss,
                "ms_step": 1e3 * float(curve.seconds[-1]) / len(curve.seconds),
                "seconds": float(curve.seconds[-1]),
                "equal_loss": loss,
                "seconds_to_equal_loss": times[name],
                "faster": _ratio(times.get(EVERY_STEP), times[name]),
                "meetings": curve.meetings,
                "wait_s": curve.wait_s,
                "wait_hidden": hidden,
                "sent_MB": curve.nbytes / 1e6,
            }
        )
    return rows


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


HEADINGS = {
    "run": ("run", "{}"),
    "loss": ("loss", "{:.4f}"),
    "valid_loss": ("valid loss", "{:.4f}"),
    "ms_step": ("ms a step", "{:.0f}"),
    "seconds_to_equal_loss": ("s to equal loss", "{:.1f}"),
    "faster": ("times as fast", "{:.2f}"),
    "wait_s": ("s waiting in meetings", "{:.2f}"),
    "wait_hidden": ("of it hidden", "{:.0%}"),
    "sent_MB": ("MB between sites", "{:.1f}"),
}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(title for title, _ in HEADINGS.values())} |"]
    lines.append("|---" * len(HEADINGS) + "|")
    for row in rows:
        cells = []
        for key, (_, form) in HEADINGS.items():
            silent = row[key] is None or (key in ("wait_s", "sent_MB") and not row[key])
            cells.append("" if silent else form.format(row[key]))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def study(asked: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Train what is missing; return the rows by rate. Raises CompareError."""
    found = {}
    for rate in asked.rates:
        curves = {}
        for name in asked.runs:
            one = training(name, rate, asked)
            seconds = one.run()
            took = "there already" if seconds is None else f"{seconds:.0f} s"
            print(f"{one.name}: {took}", flush=True)
            curves[name] = read_curve(one.folder)
        found[rate] = rows_of(curves, asked.window)
        print("\n".join(["", f"{rate}, equal loss {found[rate][0]['equal_loss']:.4f}:", ""]))
        print("\n".join([*table(found[rate]), ""]), flush=True)
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rates", nargs="+", default=list(RATES), metavar="RATE", help="of a site's link")
    add("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    add("--steps", type=int, default=500)
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=2, help="micro-batch of a rank")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--window", type=int, default=20, metavar="STEPS")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/sites"), metavar="FOLDER")
    asked = parser.parse_args(arguments)
    asked.out, asked.data = asked.out.resolve(), asked.data.resolve()
    for rate in asked.rates:
        try:
            parse_rate(rate)
        except LabError as error:
            parser.error(f"--rates: {error}")
    if asked.steps < 2 * asked.window:
        parser.error(f"--steps: expected twice --window or more, found {asked.steps}")
    if not asked.data.with_name(f"{asked.data.name}_train.idx").is_file():
        parser.error(f"--data: no dataset {asked.data}; scripts/prepare_data.py writes one")
    return asked


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print a table for each rate, and write all of it to ``sites.json``."""
    asked = parse(arguments)
    try:
        found = study(asked)
    except CompareError as error:
        raise SystemExit(f"bench_sites: {error}") from None
    names = ("steps", "seed", "batch", "width", "layers", "window", "runs")
    settings = {name: getattr(asked, name) for name in names}
    (asked.out / "sites.json").write_text(
        json.dumps({"settings": settings, "rates": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
