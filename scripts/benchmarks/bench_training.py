#!/usr/bin/env python3
"""Benchmark training over slow links: native, compressed and with peers, in one table.

bench_training.py --layouts dp2 zero1 --repetitions 3        as root: it creates links

Links are set by r, the communication time of native bf16 over its compute time: the first run has
no limit, then link rates give r = 0.25, 1 and 4. All arms run at once and alternate single steps,
and every step is paired with native bf16's step of the same turn, since the machine's speed drifts.
Every finished cell is kept in --out, and a new call continues from there. Timing stops on a busy
machine (--force continues and reports the load). Tables and JSON contain all kept cells,
so layouts and arms can be measured one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from benchmarks.shared import check_data, parser_of
from benchmarks.training_bench import cells, machine, products, report
from benchmarks.training_bench.measure import Bench
from benchmarks.training_bench.runners import CellError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    every = [name for name in cells.LAYOUTS if name != "3d"]
    add("--layouts", nargs="+", choices=list(cells.LAYOUTS), default=every)
    add("--arms", nargs="+", metavar="NAME", help="default: all that the layout has")
    add("--r", nargs="*", type=float, default=[0.25, 1.0, 4.0], help="communication to compute")
    add("--unshaped", action="store_true", help="the network without limits too")
    add("--repetitions", type=int, default=1, help="of the whole; pairs are pooled")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--length", type=int, default=128)
    add("--divide-batch", type=int, default=4, metavar="N", help="of the committed batch sizes")
    add("--warm", type=int, default=3, help="steps of a cell that are not timed")
    add("--timed", type=int, default=16, help="steps of a cell that are")
    add("--seed", type=int, default=0)
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/training_bench"), metavar="FOLDER")
    add("--busy", type=float, default=0.15, help="share of the cores that others may use")
    add("--patience", type=float, default=60.0, metavar="S", help="to wait for quiet")
    add("--force", action="store_true", help="time on a busy machine")
    add("--timeout", type=float, default=600.0, metavar="S", help="of a start or a step")
    add(
        "--processes",
        type=int,
        default=machine.room(),
        metavar="N",
        help="ranks side by side; default: what the free memory holds, here %(default)s",
    )
    add("--loopback", action="store_true", help="no lab: loopback, unshaped, no root needed")
    found = parser.parse_args(arguments)
    found.out, found.data = found.out.resolve(), found.data.resolve()
    check_data(parser, found.data)
    if found.loopback:
        found.r, found.unshaped = [], True
    if found.warm < 2 or found.timed < 1 or found.repetitions < 1:
        parser.error("--warm: expected at least 2; --timed and --repetitions: at least 1")
    found.sizes = cells.Sizes(
        found.layers, found.width, found.length, found.divide_batch, found.warm, found.timed
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit status."""
    asked = parse(arguments)
    bench = Bench(asked)
    print(f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    if products.needed():
        print("no bf16 instructions here: products of bf16 matrices run in fp32, for all arms")
    ratios = [*([None] if asked.unshaped else []), *asked.r]
    for layout in asked.layouts:
        try:
            arms = cells.arms_of(layout, asked.arms)
            bench.run(layout, arms, ratios, asked.repetitions)
        except (CellError, ValueError) as error:
            print(f"bench_training: {error}", file=sys.stderr)
            return 1
        rows = report.rows_of(bench.kept.everything())  # including cells of earlier calls
        print(f"\n{layout}\n\n{report.table_of(rows, layout)}\n", flush=True)
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "bench_training.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
