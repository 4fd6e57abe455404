"""Chapters of docs/results: training speed, losses at equal bytes, the paper's table, projection.

Each takes the folder that its script left and the folder to write into, copies figures and pictures
there and returns Markdown. Raises FileNotFoundError naming what has not been measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_bench import losses, picture, report
from training_bench.cells import FP32, LAYOUTS, REFERENCE

SCHEMES = ("naive-zfp", "mzhybrid", "zhybrid", "recommended")
#: samples a second and TFLOPS a GPU over baseline, from the paper's abstract
PAPER = {
    "naive-zfp": "+23.6 %, +22.5 %, loss degrades",
    "mzhybrid": "the hybrid schemes: +12.7 %, +17.3 %, baseline loss",
    "zhybrid": "the hybrid schemes: +12.7 %, +17.3 %, baseline loss",
    "recommended": "not in the paper",
}

SPEED_HEAD = """\
The example GPT on nodes that are network namespaces of one machine (`scripts/netlab.py`), one rank
to a node unless said otherwise, over links set so that the bytes of native bf16 take r times its
compute: r is what carries over to other machines, Mb/s is not. All arms run side by side and make
their steps in turn, one at a time, every second round backwards, because the machine's speed
changes by the minute; those that wait are stopped. A speed-up is the median of the ratios to native
bf16 of the same round ("pairs": how many), with the 95 % interval of that median. Native bf16 is
there twice: the second one makes its steps while the links have no limit, which says what r was in
these rounds (in brackets). "Of ideal" is the speed-up over what the measured bytes allow, (1 + r) /
(1 + r / bytes saved), with that r. MB are those of the interface of the node that sends most, TCP
and Ethernet headers included.

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
* Peers are eager torch: their bytes are theirs, their seconds of coding an upper bound.
* Losses are means of these first few steps of a small batch, where two runs that differ in a bit
  end some per cent apart: they show that an arm trains. Losses are compared in `loss.md` and
  `equal_bytes.md`.
* ZeRO++'s qwZ and qgZ have no CPU kernels; rows that failed say with what.
"""
PAPER_HEAD = """\
The schemes of arXiv 2409.02423 on the 3D example (tensor 2 x pipeline 2 x data 2, ZeRO 1, eight
CPU ranks), against the same training uncompressed.

| | here | the paper |
|---|---|---|
| machine | 8 ranks on shared CPU cores, links shaped | up to 192 V100, NVLink and InfiniBand |
| model | the example, from nothing | GPT-NeoX-20B, fine-tuned |
| messages | fp32, and bf16 beside it | not said; its library compresses fp32 and fp64 only |
| rates | zfp 8 and 16, mpc | not in the abstract |
| parallel degrees, batch | above, `configs/ds_3d_baseline.json` | not known |

Comparable: which scheme is faster than which, what share of what its bytes allow it reaches, and
whether it keeps the baseline's loss. Not comparable: the percentages themselves. They depend on r,
and r of the paper's machine is not known. The paper's two counters differ (+12.7 % samples,
+17.3 % TFLOPS for one scheme), which one pair of runs cannot give; here it is samples a second.
"""


def speed_chapter(source: Path, out: Path) -> str:
    """Tables and pictures of scripts/bench_training.py.

    Where only some layouts or rates were measured anew, the others stay as they were written.
    """
    fresh = _rows(source)
    rows = merged(_written(out / "speed.json"), fresh)
    (out / "speed.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    parts = [SPEED_HEAD]
    for layout in LAYOUTS:
        own = [row for row in rows if row["layout"] == layout]
        if not own:
            continue
        parts.append(f"\n## {layout}\n\n{busy_of(own)}\n\n{report.table(rows, layout)}")
        drawn = out / f"speed_{layout}.png"
        if any(row["layout"] == layout for row in fresh):
            picture.draw(rows, layout, drawn)
        if drawn.is_file():
            parts.append(f"\n![tokens a second, {layout}]({drawn.name})")
    missing = [name for name in LAYOUTS if not any(row["layout"] == name for row in rows)]
    if missing:
        parts.append(f"\nNot measured: {', '.join(missing)}.")
    parts.append(verdict(rows))
    command = "scripts/bench_training.py --layouts LAYOUT ... --out runs/training_bench"
    parts.append(
        f"\n## Commands\n\n```\n{command}\nscripts/results.py --speed runs/training_bench\n```"
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
    """What else the machine did, and how far a burst may run ahead of a link's rate."""
    found = [row["busy"] for row in rows if "busy" in row]
    if not found:
        return "No cell finished."
    bursts = sorted({row["burst_ms"] for row in rows if row.get("burst_ms")})
    buckets = "".join(f" The links' buckets hold {burst:g} ms of their rate." for burst in bursts)
    return f"Other work took up to {max(found):.0%} of the cores before a cell.{buckets}"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How many of our cells reach nine tenths of what their bytes allow; the worst is named."""
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
    """The duels of ``bench_training.py --losses``."""
    file = source / "losses" / "equal_bytes.json"
    duels = json.loads(_need(file, "bench_training.py --losses").read_text(encoding="utf-8"))
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
        "PowerSGD, which is torch's (`scripts/peers/`).\n\n"
        + "\n\n".join([losses.table(duels), *losses.optimizers(duels)])
        + "\n\n## Commands\n\n```\n"
        f"scripts/bench_training.py --losses --seeds {' '.join(numbers)}\n"
        "scripts/results.py --equal-bytes runs/training_bench\n```"
    )


def paper_chapter(source: Path, out: Path) -> str:
    """The paper's schemes on the 3D example: speed and, where they were trained, losses."""
    rows = [row for row in _rows(source) if row["layout"] == "3d"]
    if not any("failed" not in row for row in rows):
        raise FileNotFoundError(
            f"{source} holds no cell of layout 3d; bench_training.py --layouts 3d"
        )
    gaps = final_gaps(source)
    head = ["r", "scheme", "samples/s, fp32 messages", "samples/s, bf16 messages", "loss gap %",
            "the paper: samples, TFLOPS"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for ratio in sorted({row["r"] for row in rows if row["r"] is not None}):
        cells = {row["arm"]: row for row in rows if row["r"] == ratio and "failed" not in row}
        for scheme in SCHEMES:
            lines.append(
                "| " + " | ".join([
                    f"{ratio:g}", scheme, gain(cells, FP32 + scheme, "native fp32"),
                    gain(cells, scheme, REFERENCE), gaps.get(scheme, "not trained"), PAPER[scheme],
                ]) + " |"
            )  # fmt: skip
    (out / "paper.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    commands = (
        "scripts/bench_training.py --layouts 3d\n"
        "scripts/loss_study.py --layouts 3d --out runs/training_bench/losses\n"
        "scripts/results.py --paper runs/training_bench"
    )
    lines += ["", trained(source)]
    return f"{PAPER_HEAD}\n" + "\n".join(lines) + f"\n\n## Commands\n\n```\n{commands}\n```"


def gain(cells: dict[str, dict[str, Any]], arm: str, base: str) -> str:
    """Throughput of ``arm`` over ``base``; the reference of both is the same."""
    if arm not in cells or base not in cells:
        return "not measured"
    return f"{100 * (cells[arm]['speed_up'] / cells[base]['speed_up'] - 1):+.1f} %"


def trained_in_3d(source: Path) -> list[dict[str, Any]]:
    """The runs of ``loss_study.py --layouts 3d``, the baseline too; none where not trained."""
    file = source / "losses" / "3d" / "comparison.json"
    if not file.is_file():
        return []
    runs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return runs


def trained(source: Path) -> str:
    """What the gaps of the losses are of."""
    runs = trained_in_3d(source)
    if not runs:
        return "Losses were not trained."
    steps, seeds = runs[0]["steps"], runs[0]["seeds"]
    many = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]} only"
    return (
        f"Losses: the mean of the last 20 of {steps} steps over the baseline's, {many}, fp32 "
        "messages; every run has the weights and the order of the data of the baseline's run."
        f"{left_native(runs)}"
    )


def left_native(runs: Sequence[dict[str, Any]]) -> str:
    """A sentence about the dimensions of which every scheme sent all bytes, if there are any."""
    ledgers = [run["ledger"] for run in runs if run.get("ledger")]
    names = sorted({name for ledger in ledgers for name in ledger})
    whole = [
        name for name in names
        if all(way["wire_MB"] == way["raw_MB"] for ledger in ledgers
               for way in ledger.get(name, {}).values())
    ]  # fmt: skip
    if not whole:
        return ""
    return f" The messages of {', '.join(whole)} are below `min_bytes` in so small a batch: native."


def final_gaps(source: Path) -> dict[str, str]:
    """Scheme -> gap of the final loss in percent."""
    found = {}
    for run in trained_in_3d(source):
        half = run["gap_interval"]
        found[run["label"]] = f"{run['gap']:+.2f}" + ("" if half is None else f" ± {half:.2f}")
    return found


def projection_chapter(source: Path, out: Path) -> str:
    """What scripts/project_scale.py found."""
    import project_scale

    file = _need(source / "projection.json", "project_scale.py")
    found = json.loads(file.read_text(encoding="utf-8"))
    shutil.copyfile(file, out / "projection.json")
    shutil.copyfile(source / "projection.png", out / "projection.png")
    gpus = sorted({row["gpus"] for row in found["projected"]})
    assumed = ", ".join(f"{name} {value:g}" for name, value in found["assumed"].items())
    parts = [
        "Projected, not measured: a cost model fitted to cells of the training table, then asked "
        "about GPT-NeoX-20B. The paper does not say parallel degrees, batch sizes, links or speeds "
        f"of codecs; assumed here: {assumed} (bytes, seconds; codecs in GB/s).\n",
        "| cells | number | within 15 % | mean error | p90 | worst | of |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in ("fitted", "held_out"):
        part = found.get(name)
        if part:
            parts.append(
                f"| {name.replace('_', ' ')} | {part['cells']} | {part['within_15_percent']} | "
                f"{part['mean']:.1%} | "
                f"{part['p90']:.1%} | {part['worst']:.1%} | {part['worst_cell']} |"
            )
    for width in (32, 16):
        parts += [
            f"\n## Messages of {width} bits\n",
            project_scale.table(found["projected"], width, gpus),
        ]
    parts.append(
        "\n![gains against GPUs](projection.png)\n\n## Commands\n\n```\n"
        "scripts/project_scale.py docs/results/speed.json --out runs/projection\n"
        "scripts/results.py --projection runs/projection\n```"
    )
    return "\n".join(parts)


def _rows(source: Path) -> list[dict[str, Any]]:
    file = _need(source / "bench_training.json", "bench_training.py")
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def _need(file: Path, script: str) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; run scripts/{script} first")
    return file
