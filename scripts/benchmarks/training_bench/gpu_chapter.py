"""The chapter of docs/results on the GPU: speed of training, then losses at 124 M parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training_bench import gpu_losses, gpu_picture, gpu_report
from benchmarks.training_bench.cells import LAYOUTS
from benchmarks.training_bench.gpu_cells import MEASURED, SIZES

HEAD = """\
{devices}: all ranks on one, each a host of its own for NCCL: they talk over NCCL's sockets
(loopback, about 14 Gb/s for two ranks), as nodes without RDMA do. bf16, fused AdamW, buckets
of 100 MB, the example GPT (`train_gpt.py`). The ranks share the GPU's arithmetic, so
a step's compute is that of all ranks together. Which figures were aimed at, and which were never
measured: [what is proven](gpu_proof.md).
"""
SPEED = """
## Speed

All arms of a layout run side by side and take turns of a few steps; the first step of a turn is not
counted, and every round begins at the other end. "Of native" is the median of the ratios to native
bf16 of the same round, with the 95 % interval of that median. MB are those of the loopback
interface, of all ranks, headers included; "bytes" is native's over the arm's. "Compute" is native
training whose messages are cut to 16 elements in the same rounds: the ranks still wait for each
other, but nothing is on the wire. With r = (native - compute) / compute, "allowed" is
(1 + r) / (1 + r / bytes saved), the speed-up when nothing but bytes changes, and "reached" the
share of it. Peers are what their authors published where that runs (torch's hooks, DeepSpeed's
ZeRO++ with its CUDA kernels), else eager reimplementations (`scripts/benchmarks/peers/`), whose
seconds are an upper bound.
"""


def head(rows: Sequence[dict[str, Any]]) -> str:
    """Return the first words of the chapter, with the names of the devices of ``rows``."""
    named = {name for row in rows for name in row.get("device", [gpu_report.FIRST_DEVICE])}
    return HEAD.format(devices=", ".join(sorted(named or {gpu_report.FIRST_DEVICE})))


def speed_rows(source: Path) -> list[dict[str, Any]]:
    """Return the rows of speed of all files in ``source``."""
    return gpu_report.rows_of(gpu_report.read(sorted(source.glob("*.jsonl"))))


def speed(rows: Sequence[dict[str, Any]], out: Path) -> list[str]:
    """Return tables and write pictures of speed."""
    parts = [SPEED, *gpu_report.verdict(rows)]
    for size in SIZES:
        layouts = [name for name in LAYOUTS if any(_at(row, size, name) for row in rows)]
        if not layouts:
            continue
        layers, width, length, batch = SIZES[size]
        parts.append(
            f"\n### {size} parameters\n\n{layers} layers, width {width}, {batch} x {length} tokens "
            "a rank (pipelines: 4 micro-batches of half as many samples).\n"
        )
        drawn = out / f"gpu_speed_{size}.png"
        if gpu_picture.draw(rows, size, drawn):
            parts.append(f"![speed, {size}]({drawn.name})\n")
        for layout in layouts:
            own = [row for row in rows if _at(row, size, layout)]
            parts += [f"\n#### {layout}\n", *_told(own), *gpu_report.table(rows, size, layout)]
    return parts


def _at(row: dict[str, Any], size: str, layout: str) -> bool:
    return (row["size"], row["layout"]) == (size, layout)


def _told(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return r and the reports of ``auto``."""
    found = [row for row in rows if "r" in row]
    lines = []
    if found:
        most = max(found, key=lambda row: row["pairs"])
        lines.append(f"Compute {most['compute_ms']:.1f} ms, r {most['r']:.2f}.")
    lines += [f"`{row['arm']}`: {text}" for row in rows for text in row.get("auto", [])]
    return ["\n\n".join(lines) + "\n"] if lines else []


def missing(rows: Sequence[dict[str, Any]], trained: Sequence[str]) -> str:
    """Say which cells and losses the scripts could have measured and did not."""
    found = []
    for size in ("85M", "350M"):
        there = {row["layout"] for row in rows if row["size"] == size and "failed" not in row}
        left = [name for name in MEASURED if name not in there]
        if left:
            found.append(f"speed at {size}: {', '.join(left) if there else 'all layouts'}")
    left = [name for name in gpu_losses.BLOCKS if name not in trained]
    if left:
        found.append(f"losses: {', '.join(left)}")
    return f"\nNot measured yet: {'; '.join(found)}." if found else ""


def commands(seeds: Sequence[int], options: str) -> str:
    """Return the section with the commands that make the chapter again.

    ``options``: of gpu_losses.py.
    """
    numbers = " ".join(map(str, seeds))
    return f"""
## Commands

```
scripts/examples/prepare_data.py --output data/text
scripts/benchmarks/bench_gpu_training.py --size 85M --data data/text --out runs/gpu/85M.jsonl
scripts/benchmarks/bench_gpu_training.py --size 350M --data data/text --out runs/gpu/350M.jsonl \\
    --beside 4
scripts/examples/prepare_data.py FOLDER ... --suffix .py --vocabulary 50257 --max-bytes 90000000 \\
    --valid-fraction 0.04 --output data/gpt2
scripts/benchmarks/gpu_losses.py --data data/gpt2 --seeds {numbers} --out runs/gpu/losses \\
    {options}
scripts/benchmarks/results.py --gpu runs/gpu
```"""


def notes(source: Path) -> str:
    """Return the section with ``notes.md`` of the measurements, empty where there is none."""
    file = source / "notes.md"
    said = file.read_text(encoding="utf-8").rstrip() if file.is_file() else ""
    return f"\n## What to know of these figures\n\n{said}\n" if said else ""
