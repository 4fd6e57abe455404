"""Chapter of docs/results: the projection, its cost model and how far off that is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
        "scripts/studies/project_scale.py docs/results/speed.json --out runs/projection\n"
        "scripts/bench/results.py --projection runs/projection\n```"
    )
    return "\n".join(parts)
