"""Chapter of docs/results: the projection, its cost model and how far off that is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.training_bench.chapters import need
from studies import project_scale


def chapter(source: Path, out: Path) -> str:
    """What scripts/studies/project_scale.py left in ``source``. Raises FileNotFoundError."""
    file = need(source / "projection.json", "studies/project_scale.py")
    found = json.loads(file.read_text(encoding="utf-8"))
    shutil.copyfile(file, out / "projection.json")
    shutil.copyfile(source / "projection.png", out / "projection.png")
    gpus = sorted({row["gpus"] for row in found["projected"]})
    assumed = ", ".join(f"{name} {value:g}" for name, value in found["assumed"].items())
    parts = [
        "Projected, not measured: the planner (`hybridcomp.plan`), whose cost model is fitted to "
        "cells of the training table, is asked about GPT-NeoX-20B. The "
        "paper does not say parallel degrees, batch sizes, links or speeds "
        f"of codecs; assumed here: {assumed} (bytes, seconds; codecs in GB/s).\n",
        "![gains against GPUs](projection.png)\n",
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
    parts += plans(found.get("planned", []))
    parts.append(
        "\n## Commands\n\n```\n"
        "scripts/studies/project_scale.py docs/results/speed.json --out runs/projection\n"
        "scripts/bench/results.py --projection runs/projection\n```"
    )
    return "\n".join(parts)


def plans(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of the fastest plans over all layouts, natively and within the budget."""
    if not rows:
        return []
    lines = [
        "\n## The fastest plan of all layouts, messages of 16 bits\n",
        "What the search finds where tensor, pipeline and data parallel degrees, ZeRO, "
        "micro-batch, cuts and recomputation are free, without compression and within the budget "
        "`recommended`. Beside it the paper's gains; it does not say at which layout.\n",
        "| GPUs | native | samples/s | planned | samples/s | gain | GB a GPU | the paper |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        native, best = row.get("native"), row.get("recommended")
        if native is None or best is None:
            lines.append(f"| {row['gpus']} | nothing fits | - | - | - | - | - | - |")
            continue
        gain = best["samples_per_second"] / native["samples_per_second"] - 1
        lines.append(
            f"| {row['gpus']} | {native['layout']} | {native['samples_per_second']:.2f} | "
            f"{best['layout']} | {best['samples_per_second']:.2f} | {100 * gain:+.1f} % | "
            f"{best['device_nbytes'] / 1e9:.1f} | +12.7 to +23.6 % |"
        )
    lines += [f"\n{row['gpus']} GPUs: {row['reason']}." for row in rows if "reason" in row]
    return lines
