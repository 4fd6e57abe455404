"""Chapters of docs/results: training speed, losses at equal bytes.

Each takes the folder that its script left and the folder to write into, copies figures and pictures
there and returns Markdown. Raises FileNotFoundError naming what has not been measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training_bench import losses, picture, report
from benchmarks.training_bench.cells import LAYOUTS

SPEED_HEAD = """\
The example GPT on nodes that are network namespaces of one machine (`scripts/netlab.py`), one rank
to a node unless said otherwise. r = communication time / compute time of native bf16, by which the
links are set: r is what carries over to other machines, Mb/s is not. All arms run side by side and
make their steps in turn, one at a time, every second round backwards, because the machine's speed
changes by the minute; those that wait are stopped. A speed-up is the median of the ratios to native
bf16 of the same round ("pairs": how many), with the 95 % interval of that median. Native bf16 is
there twice: the second one makes its steps while the links have no limit, which says what r was in
these rounds (in brackets). "Of ideal" is the speed-up over what the measured bytes allow, (1 + r) /
(1 + r / bytes saved), with that r. MB are those of the interface of the node that sends most, TCP
and Ethernet headers included. [How it was measured](#how-it-was-measured) has the rest.
"""
SPEED_NOTES = """
## How it was measured

* Ranks with a core to themselves (here: layouts of two) are scheduled as SCHED_BATCH, all arms
  alike: a link without latency answers before `send` has returned, and gloo's thread, on the
  sender's core, then polls for a lock for a time slice (`scripts/lab/namespaces.py`). A small
  message took up to five times as long without.
* Compute is a step without limit on the links: it contains the machine's own copying of messages.
* The lab's TCP is cubic without its slow start after idle: trainings that waited for their turn go
  on as fast as before, all arms alike.
* A link's bucket lets small messages run ahead of its rate for as long as it holds, in all arms.
* Where the CPU has no bf16 instructions, products of bf16 matrices are computed in fp32 and rounded
  (torch's own loop takes forty times as long), for all arms alike. Native fp32 is context.
* gloo's reduce-scatter sends as much as its all-reduce. ZeRO 3, FSDP2 and HSDP run with one that
  goes round a ring instead, in all arms alike (`training_bench/ring.py`), and sends what NCCL's
  does ([bytes](bytes.md)).
* Peers are eager torch: their bytes are theirs, their seconds of coding an upper bound. SDP4Bit,
  written anew, sends as many bytes as `recommended` at ZeRO 0: with kernels of its own it may be
  as fast.
* qgZ's stand-in quantizes every tensor in groups of 128 values. DeepSpeed's kernels take groups of
  a matrix's shorter side, and leave vectors and what the ranks do not divide uncompressed.
* `when: auto` times up to eighteen steps of its run both ways before it settles
  (`docs/safeguards.md`). Where it is there with 28 pairs or more, that was over before the first
  step that is timed here; rows of fewer pairs may contain such steps.
* Losses are means of these first few steps of a small batch, where two runs that differ in a bit
  end some per cent apart: they show that an arm trains. Losses are compared in `loss.md` and
  `equal_bytes.md`.
* ZeRO++ itself has no kernels for CPUs: beside ZeRO 3 it was not measured, and its bytes are
  computed ([bytes](bytes.md)).
"""


def speed_chapter(source: Path, out: Path) -> str:
    """Write the chapter with tables and pictures of scripts/benchmarks/bench_training.py.

    Where only some layouts or rates were measured anew, the others stay as they were written.
    """
    fresh = rows_in(source)
    rows = merged(_written(out / "speed.json"), fresh)
    (out / "speed.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    parts = [SPEED_HEAD]
    for layout in LAYOUTS:
        own = [row for row in rows if row["layout"] == layout]
        if not own:
            continue
        parts.append(f"\n## {layout}\n")
        drawn = out / f"speed_{layout}.png"
        if any(row["layout"] == layout for row in fresh):
            picture.draw(rows, layout, drawn)
        if drawn.is_file():
            parts.append(f"![tokens a second, {layout}]({drawn.name})\n")
        parts.append(f"{busy_of(own)}\n\n{report.table(rows, layout)}")
    missing = [name for name in LAYOUTS if not any(row["layout"] == name for row in rows)]
    if missing:
        parts.append(f"\nNot measured: {', '.join(missing)}.")
    parts += [verdict(rows), SPEED_NOTES.rstrip()]
    command = "scripts/benchmarks/bench_training.py --layouts LAYOUT ... --out runs/training_bench"
    parts.append(
        f"\n## Commands\n\n```\n{command}\n"
        "scripts/benchmarks/results.py --speed runs/training_bench\n```"
    )
    return "\n".join(parts)


def merged(
    before: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """``fresh``, and of ``before`` what was not measured anew: whole tables of one layout and rate.

    Rows of one table are held against the reference in it, so they come from one of the two.
    """
    tables = {(row["layout"], row["r"]) for row in fresh}
    rows = [*(row for row in before if (row["layout"], row["r"]) not in tables), *fresh]
    order = list(LAYOUTS)
    return sorted(rows, key=lambda row: (order.index(row["layout"]), row["r"] or 0.0))


def _written(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    return rows


def busy_of(rows: Sequence[dict[str, Any]]) -> str:
    """Say how busy the machine was, and how far a burst may run ahead of a link's rate."""
    found = [row["busy"] for row in rows if "busy" in row]
    if not found:
        return "No cell finished."
    bursts = sorted({row["burst_ms"] for row in rows if row.get("burst_ms")})
    buckets = "".join(f" The links' buckets hold {burst:g} ms of their rate." for burst in bursts)
    return f"Other work took up to {max(found):.0%} of the cores before a cell.{buckets}"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Count our cells that reach nine tenths of what their bytes allow, and name the worst."""
    ours = [
        row for row in rows
        if "share" in row and not row["arm"].startswith(("native", "peer", "ZeRO++"))
    ]  # fmt: skip
    if not ours:
        return ""
    reached = sum(row["share"] >= 0.9 for row in ours)
    worst = min(ours, key=lambda row: row["share"])
    return (
        f"\n## The goal of 90 % of the ideal\n\n{reached} of {len(ours)} compressed cells reach "
        f"it; the furthest off is {worst['arm']} on {worst['layout']} at r {worst['r']:g}: "
        f"{worst['share']:.0%}."
    )


def equal_bytes_chapter(source: Path, out: Path) -> str:
    """Write the chapter with the duels of ``bench_training.py --losses``."""
    file = source / "losses" / "equal_bytes.json"
    duels = json.loads(
        need(file, "benchmarks/bench_training.py --losses").read_text(encoding="utf-8")
    )
    shutil.copyfile(file, out / "equal_bytes.json")
    numbers = [str(seed) for seed in duels[0]["seeds"]] if duels else []
    return (
        "For each peer that one of ours that sends most without sending more, chosen by bytes "
        "alone. MB are of all ranks over the whole run, native warm-ups of the peers included; "
        "gaps are to the uncompressed run in percent, paired by seed "
        f"({', '.join(numbers)}), with the 95% interval. "
        '"neither": that interval of the difference, paired by seed, holds 0.\n\n'
        "Ours are `recommended` and blocks that send less: gradients as blockint with error "
        "feedback, parameters as differences, of so many bits. The example GPT, ZeRO 1, two ranks, "
        f"{duels[0]['steps'] if duels else 0} steps. The peers are reimplementations but for "
        "PowerSGD, which is torch's (`scripts/benchmarks/peers/`).\n\n"
        + "\n\n".join([losses.table(duels), *losses.optimizers(duels)])
        + "\n\n## Commands\n\n```\n"
        f"scripts/benchmarks/bench_training.py --losses --seeds {' '.join(numbers)}\n"
        "scripts/benchmarks/results.py --equal-bytes runs/training_bench\n```"
    )


def rows_in(source: Path) -> list[dict[str, Any]]:
    """Read the rows that bench_training.py left in ``source``. Raises FileNotFoundError."""
    file = need(source / "bench_training.json", "benchmarks/bench_training.py")
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def need(file: Path, script: str) -> Path:
    """``file``. Raises FileNotFoundError naming the script that writes it."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; run scripts/{script} first")
    return file
