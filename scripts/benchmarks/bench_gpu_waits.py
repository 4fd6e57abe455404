#!/usr/bin/env python3
"""Profile a few training steps and attribute waits to codec, host, wire and other ranks.

bench_gpu_waits.py --layouts zero1 --data data/text --out runs/gpu/waits
bench_gpu_waits.py --cpu --size tiny --data data/text    # over gloo, without kernels
bench_gpu_waits.py --read --out runs/gpu/waits           # the traces again

As in bench_gpu_training.py, native, native without a wire ("compute") and one compressed arm of a
layout run at once, with all ranks on one GPU. torch's profiler records --steps steps of each on
every rank. For each layout OUT/LAYOUT.md and .json list how a step's time was spent, how much codec
and wire time overlapped with computation, and the causes of the gap to the step time that the bytes
allow. OUT/traces keeps the traces for Perfetto, which shows each wait and message.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from benchmarks.shared import check_data, parser_of, say
from benchmarks.training_bench import forked, gpu_cells, gpu_session
from benchmarks.training_bench.cells import REFERENCE
from benchmarks.training_bench.gpu_cells import COMPUTE
from benchmarks.waits_bench import figures, report, session
from benchmarks.waits_bench.session import Turns
from benchmarks.waits_bench.traces import TraceError

EVERY = list(gpu_cells.MEASURED)
#: recording settings and results of a layout, for --read
NOTE = "recorded.json"
#: With turns of 1 + 3 steps, those recorded from the 17th or 27th on avoid steps that sample errors
#: or time the device (one of ten each).
WARM, SETTLING = 11, 21


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--layouts", nargs="+", choices=EVERY, default=["zero1"])
    add("--arm", default="recommended", metavar="NAME", help="that is held against native")
    add("--size", choices=list(gpu_cells.SIZES), default="85M")
    add("--steps", type=int, default=3, help="recorded of each arm, after one that is left out")
    add("--warm", type=int, default=WARM, help="steps of an arm before its turns")
    add("--settling", type=int, default=SETTLING, help="the same of arms that measure in them")
    add("--timeout", type=float, default=120.0, metavar="S", help="of a start or a turn")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/gpu/waits"), metavar="FOLDER")
    add("--cpu", action="store_true", help="gloo instead of a GPU; lanes are operations")
    add("--read", action="store_true", help="record nothing, read OUT/traces again")
    found = parser.parse_args(arguments)
    if found.steps < 1 or found.warm < 1:
        parser.error("--steps, --warm: expected at least 1")
    if not found.read:
        check_data(parser, found.data)
    for layout in found.layouts:
        try:
            gpu_cells.arms_of(layout, [found.arm])
        except ValueError as error:
            parser.error(f"--arm: {error}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and analyze all layouts; return 1 if one failed."""
    asked = parse(arguments)
    out = asked.out.resolve()
    failed = [] if asked.read else record(asked, out / "traces")
    for layout in asked.layouts:
        if layout in failed:
            continue
        try:
            read(layout, asked.arm, out)
        except TraceError as error:
            failed.append(layout)
            say(f"{layout}: FAILED {error}")
    return int(bool(failed))


def record(asked: argparse.Namespace, traces: Path) -> list[str]:
    """Record all layouts into ``traces``; return those that failed."""
    traces.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        context = gpu_session.server_of(asked.layouts, not asked.cpu, folder, asked.timeout)
        options = gpu_cells.Options(asked.size, asked.data.resolve(), folder, not asked.cpu)
        turns = Turns(asked.warm, asked.settling, asked.steps, asked.timeout)
        for layout in asked.layouts:
            arms = gpu_cells.arms_of(layout, [asked.arm])
            try:
                found = session.record(context, options, turns, layout, arms, traces)
            except forked.JobError as error:
                failed.append(layout)
                say(f"{layout}: FAILED {error}")
                continue
            head = {"size": asked.size, "shared": not asked.cpu, "arms": found}
            (traces / f"{layout}.{NOTE}").write_text(json.dumps(head) + "\n")
    return failed


def read(layout: str, arm: str, out: Path) -> dict[str, Any]:
    """Analyze the traces of a layout, write page and figures, and return the figures.

    Raises TraceError for traces that are missing, damaged or written by another program.
    """
    began, note = time.monotonic(), out / "traces" / f"{layout}.{NOTE}"
    try:
        head = json.loads(note.read_text())
        turns, shared = head["arms"], head["shared"]
        lanes = {
            name: figures.recorded(
                [out / "traces" / file for file in turns[name]["traces"]], gpu=shared
            )
            for name in (REFERENCE, COMPUTE, arm)
        }
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{note}: expected what bench_gpu_waits.py has recorded of {arm!r}, found {error}; "
            "record it without --read"
        ) from None
    arms = {name: figures.figures_of(ranks, shared) for name, ranks in lanes.items()}
    saving = turns[REFERENCE]["sent_MB"] / max(turns[arm]["sent_MB"], 1e-9)
    names = REFERENCE, COMPUTE, arm
    missed = figures.missing(arms, names, saving)
    missed["reached_unrecorded"] = figures.reached(turns, names, saving)
    found = {
        "layout": layout, "size": head["size"], "arms": arms,
        "turns": {
            name: {key: value for key, value in turns[name].items() if key != "traces"}
            for name in arms
        },
        "missing": {arm: missed},
    }  # fmt: skip
    report.write(found, out / f"{layout}.json")
    print(report.page(found))
    say(f"{layout}: read in {time.monotonic() - began:.1f} s: {out / layout}.md")
    return found


if __name__ == "__main__":
    sys.exit(main())
