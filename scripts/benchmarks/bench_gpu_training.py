#!/usr/bin/env python3
"""Benchmark training over NCCL with several ranks on one GPU: native, compressed and peers.

scripts/benchmarks/bench_gpu_training.py --size 85M --out runs/gpu/85M.jsonl

NCCL treats each rank as a separate host, so ranks talk over sockets at about 14 Gb/s. All arms of a
layout run at once and take turns of a few steps; each turn is compared with native bf16's turn of
the same round. The arm "compute" is native training with messages truncated to a few elements: the
step time without a wire. Records are appended to --out, which several calls may share. At the end
the tables of all records are printed and written to a .md file next to --out: each arm's speed as a
share of the speed that its bytes allow, marked MISSED below the target. --resume measures only the
missing rounds and exits with 75 if --budget ran out first; run the same command again to continue.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from benchmarks.shared import TIME_IS_UP, check_data, parser_of, say
from benchmarks.training_bench import gpu_cells, gpu_report, gpu_session, machine
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE, Arm
from benchmarks.training_bench.gpu_cells import COMPUTE
from benchmarks.training_bench.gpu_session import Book, Part, Plan, Session

#: seconds that a part needs to start and to run its first round
START_S = 100.0
EVERY = list(gpu_cells.MEASURED)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--layouts", nargs="+", choices=EVERY, default=EVERY)
    add("--arms", nargs="+", metavar="NAME", help="where a layout has them; default: all")
    add("--size", choices=list(gpu_cells.SIZES), default="85M")
    add("--rounds", type=int, default=6)
    add("--timed", type=int, default=3, help="steps of a turn, after one that is not timed")
    add("--warm", type=int, default=3, help="steps of an arm before its first turn")
    add("--settling", type=int, default=14, help="the same of arms that measure in them")
    add("--beside", type=int, metavar="N",
        help="arms at once, two of them native; default: what 80 GB hold at 85M")  # fmt: skip
    add("--together", type=int, default=1, metavar="N", help="layouts whose ranks start at once")
    add("--budget", type=float, default=3600.0, metavar="S", help="no round begins after this")
    add("--resume", action="store_true", help="only rounds that --out does not have")
    add("--timeout", type=float, default=120.0, metavar="S", help="of a start or a turn")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/gpu/speed.jsonl"), metavar="FILE")
    add("--logs", type=Path, metavar="FOLDER", help="keep the ranks' logs there")
    add("--cpu", action="store_true", help="gloo instead of a GPU, to try the script itself")
    found = parser.parse_args(arguments)
    check_data(parser, found.data)
    if found.beside is not None and found.beside < 3:
        parser.error("--beside: expected at least 3")
    if found.together < 1:
        parser.error("--together: expected at least 1")
    found.plan = ordered(found.layouts, found.arms, found.beside)
    return found


def parts_of(layout: str, chosen: list[str] | None, beside: int | None) -> list[list[Arm]]:
    """Return the parts, lists of arms that run at once: reference, "compute" and some others."""
    place = LAYOUTS[layout]
    beside = beside or max(4, 10 - place.nodes * place.per_node)
    known = {arm.name for arm in gpu_cells.arms_of(layout)}
    arms = gpu_cells.arms_of(layout, None if chosen is None else [a for a in chosen if a in known])
    always = [arm for arm in arms if arm.name in (REFERENCE, COMPUTE)]
    others = [arm for arm in arms if arm not in always]
    room = beside - len(always)
    return [[*always, *others[i : i + room]] for i in range(0, max(1, len(others)), room)]


def ordered(layouts: Sequence[str], chosen: list[str] | None, beside: int | None) -> list[Part]:
    """List the parts in measuring order: the first parts of all layouts come first."""
    found = [
        Part(layout, number, tuple(arms))
        for layout in layouts
        for number, arms in enumerate(parts_of(layout, chosen, beside))
    ]
    return sorted(found, key=lambda part: part.number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit status."""
    asked = parse(arguments)
    deadline = time.monotonic() + asked.budget
    book = Book(asked.out.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.logs.resolve() if asked.logs else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        layouts = [part.layout for part in asked.plan]
        context = gpu_session.server_of(layouts, not asked.cpu, folder, asked.timeout)
        name = "a CPU" if asked.cpu else machine.gpu_name()
        options = gpu_cells.Options(
            asked.size, asked.data.resolve(), folder, not asked.cpu, device=name
        )
        plan = Plan(asked.warm, asked.settling, asked.timed, asked.rounds, asked.timeout)
        built = _build([arm for part in asked.plan for arm in part.arms], asked.cpu, folder)
        if built is not None:  # before any timing; an arm that needs the failed build reports it
            with contextlib.suppress(subprocess.TimeoutExpired):
                built.wait(asked.timeout)
            built.kill()

        def session(part: Part) -> Session:
            return Session(context, options, plan, book, deadline, part)

        status = _measure(asked, session, book, deadline)
    if asked.out.is_file():
        text = gpu_report.page(asked.out)
        asked.out.with_suffix(".md").write_text(text)
        print(text, flush=True)
    return status


def _measure(
    asked: argparse.Namespace, session: Callable[[Part], Session], book: Book, deadline: float
) -> int:
    """Measure all parts, one after the other; return the exit status."""
    over = True
    missing = _missing(asked, book)
    for start in range(0, len(missing), asked.together):
        parts = missing[start : start + asked.together]
        if time.monotonic() + START_S * asked.resume > deadline:
            say(f"{', '.join(f'{p.layout}, part {p.number}' for p in parts)}: no time left")
            over = False
            continue
        over = gpu_session.run([session(part) for part in parts]) and over
    return 0 if over or not asked.resume else TIME_IS_UP


def _missing(asked: argparse.Namespace, book: Book) -> list[Part]:
    """Return the parts with rounds left to measure, each from its first missing round on."""
    if not asked.resume:
        return list(asked.plan)
    found = []
    for part in asked.plan:
        first = book.rounds(asked.size, part.layout, part.names)
        if first >= asked.rounds:
            say(f"{part.layout}, part {part.number}: is there")
        else:
            found.append(replace(part, first=first))
    return found


def _build(arms: list[Arm], cpu: bool, folder: Path) -> subprocess.Popen[bytes] | None:
    """Compile DeepSpeed's quantizer if an arm of ZeRO++ needs it."""
    if cpu or not any(arm.zero for arm in arms):
        return None
    code = "from deepspeed.ops.op_builder import QuantizerBuilder as B; B().load()"
    with (folder / "quantizer.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=log, stderr=log,
            env={**os.environ, "MAX_JOBS": "8"},
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
