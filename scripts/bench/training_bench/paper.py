"""The chapter of docs/results that holds the schemes of the paper against ours.

It takes the folder that bench_training.py left and the folder to write into; see ``chapters``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.training_bench.cells import FP32, REFERENCE
from bench.training_bench.chapters import rows_in

SCHEMES = ("naive-zfp", "mzhybrid", "zhybrid", "recommended")
#: samples a second and TFLOPS a GPU over baseline, from the paper's abstract
PAPER = {
    "naive-zfp": "+23.6 %, +22.5 %, loss degrades",
    "mzhybrid": "the hybrid schemes: +12.7 %, +17.3 %, baseline loss",
    "zhybrid": "the hybrid schemes: +12.7 %, +17.3 %, baseline loss",
    "recommended": "not in the paper",
}

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


def paper_chapter(source: Path, out: Path) -> str:
    """Write the chapter of the paper's schemes on the 3D example: speed and losses."""
    rows = [row for row in rows_in(source) if row["layout"] == "3d"]
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
        "scripts/bench/bench_training.py --layouts 3d\n"
        "scripts/bench/loss_study.py --layouts 3d --out runs/training_bench/losses\n"
        "scripts/bench/results.py --paper runs/training_bench"
    )
    lines += ["", trained(source)]
    return f"{PAPER_HEAD}\n" + "\n".join(lines) + f"\n\n## Commands\n\n```\n{commands}\n```"


def gain(cells: dict[str, dict[str, Any]], arm: str, base: str) -> str:
    """Return the throughput of ``arm`` over ``base``; the reference of both is the same."""
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
    """Say of which steps and seeds the gaps of the losses are."""
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
    """Return the gap of the final loss in percent, by scheme."""
    found = {}
    for run in trained_in_3d(source):
        half = run["gap_interval"]
        found[run["label"]] = f"{run['gap']:+.2f}" + ("" if half is None else f" ± {half:.2f}")
    return found
