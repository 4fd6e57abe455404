#!/usr/bin/env python3
"""Hold ``hybridcomp plan`` against measured steps of many layouts and blocks over shaped links.

As root, with data of scripts/prepare_data.py:

    python scripts/bench/bench_plan.py trainings --ranks 2 --rates 200mbit 600mbit 2gbit
    python scripts/bench/bench_plan.py slow
    python scripts/bench/bench_plan.py report --out docs/results/planner.md

``trainings``: every configuration is trained by train_gpt.py with the files that the planner
writes, all side by side, in turns, of which one at a time makes a step. At each rate ``hybridcomp
measure`` runs several times between the turns, and the one counts whose block was fastest. This
machine has several speeds: between any two steps a block runs that says at which one they ran, and
all that the ranks compute is predicted at that speed. Of steps and blocks the fastest half counts
(``plan_bench/speed.py`` says why). Every configuration is predicted from these
files alone, with the layout that was trained; nothing is fitted to the trainings. A rate that is
named again replaces its rows; those of other rates stay. Ranks play slower processors
(``lab.slow_processors``), which leaves the cores to the threads and the kernel that move bytes, and
makes ranks as fast beside each other as alone. ``slow``: the same for four ranks, one of them half
as fast as the others, in even stages and in those of the planner, who knows only the measurement.
``report`` makes the page of the results of both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.plan_bench import slow, trained
from bench.plan_bench.report import Row, page, told
from bench.plan_bench.speed import Probe, at_speed, fastest
from bench.plan_bench.trained import Model
from bench.training_bench.runners import CellError
from bench.training_bench.turns import Job as Turns
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.predict import plan_of
from hybridcomp.plan.cost.work import work_of
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.machines import cluster_file
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.plan import Plan
from hybridcomp.plan.search.placing import Placer
from lab.cluster import Lab
from lab.layout import LabError, Rates, parse_rate
from lab.layout import Layout as Nodes
from lab.slow_processors import SlowProcessors, slow_processors

#: what is compressed, by name: blocks of a ds_config
BLOCKS: dict[str, dict[str, Any]] = {
    "native": {"preset": "none"},
    "8 bits": {"dp": {"codec": "blockint", "bits": 8}, "zero": {"codec": "blockint", "bits": 8},
               "pp": {"codec": "blockint", "bits": 8}},
    "recommended": {"preset": "recommended", "when": "always"},
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
#: by ranks: how many times slower than a core of this machine their processors are, on two cores
TIMES = {2: 2.0, 4: 2.5}
Turned = Callable[[int], None]


class Tried(NamedTuple):
    """Trainings of plans that take turns, and a block that tells the machine's speed."""

    plans: Sequence[tuple[Plan, Turns]]
    probe: Probe


def layout_of(model: Model, data: int, stages: int, zero_stage: int) -> Layout:
    """Return the layout of the example with these replicas and stages."""
    accumulation = model.samples // (data * model.micro_batch)
    return Layout(
        data=data, stages=stages, zero_stage=zero_stage, micro_batch=model.micro_batch,
        accumulation=accumulation, hierarchy=False,
    )  # fmt: skip


def plans(model: Model, cluster: Cluster, ranks: int) -> list[Plan]:
    """Return every configuration, placed and predicted from a measurement alone."""
    job = model.job(cluster)
    found = []
    for data, stages, zero_stage, names in TRIED[ranks]:
        for name in names:
            choices = Choices.of_block(BLOCKS[name])
            layout = layout_of(model, data, stages, zero_stage)
            work = next(Placer(job).places(layout, False))
            found.append(plan_of(job, work, choices, name))
    return found


def measured(
    rate: str, lab: Lab, model: Model, turns: Turned, own: SlowProcessors, args: argparse.Namespace
) -> Cluster:
    """Measure several times, with turns of training between; return the fastest measurement."""
    clusters = []
    for part in range(args.parts + 1):
        if part:
            path = args.folder / f"{args.ranks}ranks_{rate}_{part}.json"
            trained.measured(lab, model, path, args.seconds / args.parts, own.words)
            clusters.append(cluster_file.read(path))
        turns((part + 1) * args.turns // (args.parts + 1) - part * args.turns // (args.parts + 1))
    return fastest(clusters)


def at_rate(
    rate: str, lab: Lab, model: Model, tried: Tried, own: SlowProcessors, args: argparse.Namespace
) -> list[Row]:
    """Measure and train in turns at one rate, then predict what was trained."""
    lab.shape(Rates(parse_rate(rate)))
    jobs, probe = [turns for _, turns in tried.plans], tried.probe
    trained.turns(jobs, SETTLE, probe.turns)
    first, begun = len(jobs[0].said[0]), probe.count

    def turns(count: int) -> None:
        trained.turns(jobs, count, probe.turns)

    cluster = measured(rate, lab, model, turns, own, args)
    slowdown = probe.slowdown(cluster, begun)
    print(f"{args.ranks} ranks {rate}: the block took {slowdown:.2f} times its measured seconds")
    job, rows = at_speed(model.job(cluster), slowdown), []
    for plan, one in tried.plans:
        work = work_of(job, plan.layout)  # the layout that was trained, cuts and all
        told_ = plan_of(job, work, plan.choices, plan.budget).prediction
        rows.append(Row(
            args.ranks, rate, str(plan.layout), plan.budget, told_.seconds,
            trained.seconds(one, first),
        ))  # fmt: skip
        print(rows[-1], flush=True)
    steps = {str(row): [said[first:] for said in one.said]
             for row, (_, one) in zip(rows, tried.plans, strict=True)}  # fmt: skip
    steps["block"] = [said[begun:] for said in probe.turns.said]
    (args.folder / f"{args.ranks}ranks_{rate}_steps.json").write_text(json.dumps(steps))
    return rows


def check_rising(rates: Sequence[str]) -> None:
    """Raise LabError unless every rate is above the one before it.

    A connection that was made on a fast link keeps its longer packets on a slower one, where the
    kernel cuts them up: measured, a native step took up to two thirds longer there.
    """
    bits = [parse_rate(rate) or math.inf for rate in rates]
    if any(one >= two for one, two in pairwise(bits)):
        raise LabError(
            f"--rates {' '.join(rates)}: rates have to rise within a session, as connections keep "
            "the packets of a faster link; order them, or name those again in a session of its own"
        )


def trainings(args: argparse.Namespace) -> None:
    """Train all configurations at all rates; write the rows to a file of the folder."""
    model = Model()
    check_rising(args.rates)
    args.folder.mkdir(parents=True, exist_ok=True)
    out = args.folder / f"rows{args.ranks}.json"
    before = [Row(**row) for row in json.loads(out.read_text())] if out.is_file() else []
    steps = WARM + len(args.rates) * (SETTLE + args.turns) + 1
    rows = [row for row in before if row.rate not in args.rates]
    with (
        slow_processors([TIMES[args.ranks]] * args.ranks) as own,
        Lab(Nodes.parse(str(args.ranks)), Rates(parse_rate(args.rates[0]))) as lab,
    ):
        path = args.folder / f"{args.ranks}ranks_first.json"
        if not path.is_file():  # the planner writes files for a measured cluster alone
            trained.measured(lab, model, path, args.seconds, own.words)
        cluster = cluster_file.read(path)
        with trained.session(lab, args.ranks, own.words) as session:
            started = []
            for number, plan in enumerate(plans(model, cluster, args.ranks)):
                folder = (args.folder / f"{args.ranks}ranks_{number}").resolve()
                started.append((plan, trained.started(
                    session, plan, cluster, model, args.data, folder, steps
                )))  # fmt: skip
            tried = Tried(started, Probe.started(session, model.block))
            trained.turns([turns for _, turns in started], WARM)
            for rate in args.rates:
                if args.ask:
                    print(f"{rate}: Enter begins", flush=True)
                    sys.stdin.readline()
                own.limit(True)
                rows += at_rate(rate, lab, model, tried, own, args)
                own.limit(False)
                rows.sort(key=lambda row: parse_rate(row.rate) or 0)
                out.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    print("\n".join(told(rows)))


def slow_rank(args: argparse.Namespace) -> None:
    """Train even stages and the planner's with one of four ranks slowed by half."""
    args.folder.mkdir(parents=True, exist_ok=True)
    found = slow.compared(args.folder, args.data, args.seconds, args.turns)
    (args.folder / "slow.json").write_text(json.dumps(found._asdict(), indent=1) + "\n")
    print(found)


def report(args: argparse.Namespace) -> None:
    """Write and print the page of the results."""
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
            one.add_argument(
                "--ask", action="store_true",
                help="wait for Enter before every rate, such as until nothing else runs",
            )  # fmt: skip
            one.add_argument("--parts", type=int, default=2, help="measurements at each rate")
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
