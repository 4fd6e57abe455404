#!/usr/bin/env python3
"""How well ``hybridcomp plan`` predicts: steps of many layouts and blocks over shaped links.

One command, as root, with data of scripts/prepare_data.py:

    python scripts/bench/bench_plan.py --data data/text --ranks 2 --rates 100mbit 400mbit 2gbit

For each rate a netlab is built, ``hybridcomp measure`` runs on its ranks, every configuration is
predicted from that file alone (nothing is fitted to a training), then trained by train_gpt.py with
the files that the planner writes. Printed: both seconds a step, the miss, Spearman's correlation
over all, and how much slower the configuration that was predicted to be the fastest is than the
fastest that was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from hybridcomp.compare.launch import fill
from hybridcomp.plan.answer import files, trial
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.predict import plan_of
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.machines import cluster_file
from hybridcomp.plan.models.reading import read_model
from hybridcomp.plan.plan import Plan
from hybridcomp.plan.request import Batch, Limits
from hybridcomp.plan.search.placing import Placer
from lab.cluster import Lab
from lab.layout import LabError, Rates, parse_rate
from lab.layout import Layout as Nodes

ROOT = Path(__file__).resolve().parents[1]
#: what is compressed, by name: blocks of a ds_config
BLOCKS: dict[str, dict[str, Any]] = {
    "native": {"preset": "none"},
    "8 bits": {"dp": {"codec": "blockint", "bits": 8}, "zero": {"codec": "blockint", "bits": 8},
               "pp": {"codec": "blockint", "bits": 8}},
    "recommended": {"preset": "recommended"},
}  # fmt: skip
SAMPLES, LENGTH, MICRO_BATCH = 16, 128, 2
#: seconds that one training may take
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Row:
    """One configuration at one rate."""

    rate: str
    layout: str
    block: str
    predicted: float
    measured: float

    @property
    def miss(self) -> float:
        """How much longer it took than predicted, as a share."""
        return self.measured / self.predicted - 1


def layouts(ranks: int) -> list[Layout]:
    """What ``ranks`` ranks are tried as: replicas at ZeRO 0 to 2, stages, both."""
    found = [_layout(ranks, 1, stage) for stage in (0, 1, 2)]
    found.append(_layout(1, ranks, 0))
    if ranks > 2:
        found.append(_layout(ranks // 2, 2, 1))
    return found


def _layout(data: int, stages: int, zero_stage: int) -> Layout:
    accumulation = SAMPLES // (data * MICRO_BATCH)
    return Layout(
        data=data, stages=stages, zero_stage=zero_stage, micro_batch=MICRO_BATCH,
        accumulation=accumulation, hierarchy=False,
    )  # fmt: skip


def plans(model: Sequence[str], cluster: Path, ranks: int) -> list[tuple[str, Plan]]:
    """Every configuration with its prediction, from the file of ``hybridcomp measure`` alone."""
    limits = Limits(dtype="fp32", recompute=False)
    job = Job(read_model(model), cluster_file.read(cluster), Batch(SAMPLES, LENGTH), limits)
    found = []
    for layout in layouts(ranks):
        for name, block in BLOCKS.items():
            choices = Choices.of_block(block)
            feedback = any(choice.error_feedback for _, choice in choices)
            for work in list(Placer(job).places(layout, feedback))[:1]:
                found.append((name, plan_of(job, work, choices, name)))
    return found


def run(lab: Lab, words: Sequence[str]) -> None:
    """Run ``words`` on every rank. Raises LabError with the output of the rank that failed."""
    path = f"{ROOT}:{ROOT.parent}:{os.environ.get('PYTHONPATH', '')}"
    result = lab.run(words, env={"PYTHONPATH": path}, timeout=PATIENCE_S, echo="none")
    if result.status:
        failed = next(i for i, status in enumerate(result.statuses) if status)
        raise LabError(result.outputs[failed][-3000:])


def trained(lab: Lab, plan: Plan, cluster: Path, folder: Path, args: argparse.Namespace) -> float:
    """Median seconds a step of a training with the planner's own files."""
    base = json.loads((ROOT.parent / "configs" / "ds_zero1_baseline.json").read_text())
    script = [sys.executable, "-m", "hybridcomp.run", str(ROOT / "train_gpt.py")]
    words = [
        *script, *model_words(args), "--data", str(args.data), "--steps", str(args.steps),
        "--pp", "{stages}", "--cuts", "{cuts}", "--eval-batches", "0", "--print-every", "1000",
        "--deepspeed_config", "{config}", "--log", str(folder / trial.LOG),
    ]  # fmt: skip
    made = cluster_file.read(cluster)
    files.write(plan, made, folder, base, words, folder / trial.LEDGER)
    run(lab, fill(words, files.places(plan, made, folder)))
    return trial.seconds_a_step(folder / trial.LOG, plan)


def model_words(args: argparse.Namespace) -> list[str]:
    """The model, in the words of train_gpt.py."""
    return ["--layers", str(args.layers), "--width", str(args.width), "--heads", "4",
            "--length", str(LENGTH)]  # fmt: skip


def at_rate(rate: str, args: argparse.Namespace) -> list[Row]:
    """Measure, predict and train at one rate."""
    folder = (args.out / f"{args.ranks}ranks_{rate}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cluster, rows = folder / "cluster.json", []
    with Lab(Nodes.parse(str(args.ranks)), Rates(parse_rate(rate))) as lab:
        if not cluster.is_file():
            block = f"{MICRO_BATCH}x{LENGTH}x{args.width}x4"
            words = ["--out", str(cluster), "--seconds", str(args.seconds), "--block", block]
            run(lab, [sys.executable, "-m", "hybridcomp.measure", *words])
        model = ["train_gpt.py", *model_words(args), "--vocabulary", str(args.vocabulary)]
        for number, (name, plan) in enumerate(plans(model, cluster, args.ranks)):
            where = folder / f"{number}"
            where.mkdir(exist_ok=True)
            measured = trained(lab, plan, cluster, where, args)
            row = Row(rate, str(plan.layout), name, plan.prediction.seconds, measured)
            rows.append(row)
            print(f"{rate:>9} {row.layout:22} {name:12} predicted {row.predicted:7.3f} s, "
                  f"measured {measured:7.3f} s, {row.miss:+6.1%}", flush=True)  # fmt: skip
    return rows


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    ranks = [[float(sorted(values).index(value)) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def summary(rows: Sequence[Row]) -> str:
    """What a reader wants to know of all rows, as Markdown."""
    misses = sorted(abs(row.miss) for row in rows)
    rank = spearman([row.predicted for row in rows], [row.measured for row in rows])
    lines = [
        "| rate | layout | block | predicted s | measured s | miss |", "|---|---|---|---|---|---|",
        *(f"| {r.rate} | {r.layout} | {r.block} | {r.predicted:.3f} | {r.measured:.3f} "
          f"| {r.miss:+.1%} |" for r in rows),
        "",
        f"{len(rows)} configurations: Spearman {rank:.3f}, miss {statistics.median(misses):.1%} "
        f"median, {misses[int(0.9 * (len(misses) - 1))]:.1%} p90.",
    ]  # fmt: skip
    for rate in dict.fromkeys(row.rate for row in rows):
        own = [row for row in rows if row.rate == rate]
        chosen = min(own, key=lambda row: row.predicted)
        best = min(own, key=lambda row: row.measured)
        lines.append(
            f"At {rate} {chosen.layout}, {chosen.block} is chosen: "
            f"{chosen.measured / best.measured - 1:.1%} slower than the fastest "
            f"({best.layout}, {best.block})."
        )
    return "\n".join(lines)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--ranks", type=int, choices=(2, 4), default=2, help="one a node (2)")
    add("--rates", nargs="+", default=["100mbit", "400mbit", "2gbit"])
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--vocabulary", type=int, default=257, help="of the data; bytes and an end (257)")
    add("--steps", type=int, default=12)
    add("--seconds", type=float, default=60.0, help="of hybridcomp measure at each rate")
    add("--out", type=Path, default=Path("runs/plan"), metavar="FOLDER")
    args = parser.parse_args()
    rows: list[Row] = []
    try:
        for rate in args.rates:
            rows += at_rate(rate, args)
            (args.out / f"rows{args.ranks}.json").write_text(
                json.dumps([vars(row) for row in rows], indent=1) + "\n"
            )
    except LabError as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 1
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
