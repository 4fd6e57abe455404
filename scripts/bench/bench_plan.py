#!/usr/bin/env python3
"""How well ``hybridcomp plan`` predicts: steps of many layouts and blocks over shaped links.

As root, with data of scripts/prepare_data.py:

    python scripts/bench/bench_plan.py trainings --ranks 2 --rates 200mbit 600mbit 2gbit
    python scripts/bench/bench_plan.py slow
    python scripts/bench/bench_plan.py report --out docs/results/planner.md

``trainings``: every configuration is trained by train_gpt.py with the files that the planner
writes, all side by side, in turns, of which one at a time makes a step. At each rate half of the
turns come before ``hybridcomp measure`` and half behind it: a machine whose speed changes by the
minute is then the same to both. Every configuration is predicted from that file alone; nothing is
fitted to these trainings. ``slow``: the same for four ranks with shares of a core, one of them with
half of the others', in even stages and in those of the planner, who knows only the measurement.
``report`` makes the page of the results of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.plan_bench import slow, trained
from bench.plan_bench.report import Row, page, told
from bench.plan_bench.trained import Model
from bench.training_bench.runners import CellError
from bench.training_bench.turns import Job as Turns
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.calibrate import calibrated
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.predict import plan_of
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.machines import cluster_file
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.models.reading import read_model
from hybridcomp.plan.plan import Plan
from hybridcomp.plan.request import Batch, Limits
from hybridcomp.plan.search.placing import Placer
from lab.cluster import Lab
from lab.layout import LabError, Rates, parse_rate
from lab.layout import Layout as Nodes

#: what is compressed, by name: blocks of a ds_config
BLOCKS: dict[str, dict[str, Any]] = {
    "native": {"preset": "none"},
    "8 bits": {"dp": {"codec": "blockint", "bits": 8}, "zero": {"codec": "blockint", "bits": 8},
               "pp": {"codec": "blockint", "bits": 8}},
    "recommended": {"preset": "recommended"},
}  # fmt: skip
#: by ranks: replicas, stages, ZeRO stage, and the blocks that are tried
TRIED: dict[int, tuple[tuple[int, int, int, tuple[str, ...]], ...]] = {
    2: (
        (2, 1, 0, ("native", "8 bits", "recommended")),
        (2, 1, 1, ("8 bits",)),
        (2, 1, 2, ("native", "8 bits")),
        (1, 2, 0, ("native", "recommended")),
    ),
    4: (
        (4, 1, 0, ("native", "8 bits")),
        (4, 1, 1, ("recommended",)),
        (2, 2, 1, ("native", "8 bits")),
        (1, 4, 0, ("native",)),
    ),
}
#: steps of every training before the first rate, and after every change of the rate
WARM, SETTLE = 2, 1


def layout_of(model: Model, data: int, stages: int, zero_stage: int) -> Layout:
    """Replicas and stages of the example."""
    accumulation = model.samples // (data * model.micro_batch)
    return Layout(
        data=data, stages=stages, zero_stage=zero_stage, micro_batch=model.micro_batch,
        accumulation=accumulation, hierarchy=False,
    )  # fmt: skip


def plans(model: Model, cluster: Cluster, ranks: int) -> list[tuple[str, Plan]]:
    """Every configuration with its prediction, from a measurement alone."""
    limits = Limits(dtype="fp32", recompute=False)
    words = ["train_gpt.py", *model.words, "--vocabulary", str(model.vocabulary)]
    batch = Batch(model.samples, model.length)
    job = calibrated(Job(read_model(words), cluster, batch, limits))
    found = []
    for data, stages, zero_stage, names in TRIED[ranks]:
        for name in names:
            choices = Choices.of_block(BLOCKS[name])
            layout = layout_of(model, data, stages, zero_stage)
            work = next(Placer(job).places(layout, False))
            found.append((name, plan_of(job, work, choices, name)))
    return found


def at_rate(
    rate: str, lab: Lab, model: Model, jobs: Sequence[Turns], args: argparse.Namespace
) -> list[Row]:
    """Half of the turns, the measurement, the other half; then the predictions."""
    lab.shape(Rates(parse_rate(rate)))
    trained.turns(jobs, SETTLE)
    first = len(jobs[0].said[0])
    trained.turns(jobs, args.turns // 2)
    path = args.folder / f"{args.ranks}ranks_{rate}.json"
    trained.measured(lab, model, path, args.seconds)
    trained.turns(jobs, args.turns - args.turns // 2)
    rows = []
    for job, (name, plan) in zip(
        jobs, plans(model, cluster_file.read(path), args.ranks), strict=True
    ):
        told_ = plan.prediction
        rows.append(Row(
            args.ranks, rate, str(plan.layout), name, told_.seconds, trained.seconds(job, first)
        ))  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def trainings(args: argparse.Namespace) -> None:
    """All configurations at all rates; the rows go to a file of the folder."""
    model = Model()
    args.folder.mkdir(parents=True, exist_ok=True)
    out = args.folder / f"rows{args.ranks}.json"
    before = [Row(**row) for row in json.loads(out.read_text())] if out.is_file() else []
    steps = WARM + len(args.rates) * (SETTLE + args.turns) + 1
    rows = [row for row in before if row.rate not in args.rates]
    with Lab(Nodes.parse(str(args.ranks)), Rates(parse_rate(args.rates[0]))) as lab:
        path = args.folder / f"{args.ranks}ranks_first.json"
        if not path.is_file():  # the planner writes files for a measured cluster alone
            trained.measured(lab, model, path, args.seconds)
        cluster = cluster_file.read(path)
        with trained.session(lab, args.ranks) as session:
            jobs = []
            for number, (_, plan) in enumerate(plans(model, cluster, args.ranks)):
                folder = (args.folder / f"{args.ranks}ranks_{number}").resolve()
                jobs.append(trained.started(
                    session, plan, cluster, model, args.data, folder, steps
                ))  # fmt: skip
            trained.turns(jobs, WARM)
            for rate in args.rates:
                rows += at_rate(rate, lab, model, jobs, args)
                rows.sort(key=lambda row: parse_rate(row.rate) or 0)
                out.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    print("\n".join(told(rows)))


def slow_rank(args: argparse.Namespace) -> None:
    """Even stages and the planner's, one of four ranks slowed by half."""
    args.folder.mkdir(parents=True, exist_ok=True)
    found = slow.compared(args.folder, args.data, args.seconds, args.turns)
    (args.folder / "slow.json").write_text(json.dumps(found._asdict(), indent=1) + "\n")
    print(found)


def report(args: argparse.Namespace) -> None:
    """The page of the results."""
    text = page(args.folder)
    args.out.write_text(text)
    print(text)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("trainings", trainings), ("slow", slow_rank), ("report", report)):
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        one.add_argument("--folder", type=Path, default=Path("runs/plan"), help="of rows and files")
        if name == "report":
            one.add_argument("--out", type=Path, default=Path("docs/results/planner.md"))
            continue
        one.add_argument("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
        one.add_argument("--turns", type=int, default=8, help="timed steps (at each rate)")
        one.add_argument("--seconds", type=float, default=40.0, help="of hybridcomp measure")
        if name == "trainings":
            one.add_argument("--ranks", type=int, choices=tuple(TRIED), default=2)
            one.add_argument("--rates", nargs="+", default=["200mbit", "600mbit", "2gbit"])
    args = parser.parse_args()
    try:
        args.run(args)
    except (LabError, CellError) as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
