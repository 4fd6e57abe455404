"""Table and picture of what gather_study.py left: a file for each run, its name the case."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE = "native_fp32"
_NAME = re.compile(r"(?P<way>[a-z-]+)_(?P<bits>\d+)_seed(?P<seed>\d+)")

#: way of ``gather_study`` -> what the table says of it; in the order of the table
WORDS = {
    "block": "`blockint`: a scale for 32 values",
    "gaussian": "`blockint`, `levels` gaussian",
    "block-rotate": "rotated, then `blockint`",
    "shard": "a scale for a shard",
    "shard-rotate": "rotated, then a scale for a shard",
    "block-feedback": "`blockint`, error feedback",
    "gaussian-feedback": "`levels` gaussian, error feedback",
    "block-rotate-feedback": "rotated `blockint`, error feedback",
    "shard-feedback": "a scale for a shard, error feedback",
}
HEAD = """\
Under FSDP2 nobody keeps the unsharded parameters, so a gather cannot send what changed since the
last one; what every owner has is its exact fp32 shard. Which way makes the most of few bits there?
The example GPT (0.85 M parameters, fp32), trained in one process on parameters as the shards of two
owners decode, while the optimizer updates the exact ones: {steps} steps of 512 tokens, seeds
{seeds}. The backward pass sees the parameters of the forward pass. "Error" is that of all decoded
parameters, relative L2, over the run. Gaps are per cent of the run with exact parameters, paired by
seed, means over the seeds: of the training loss over the last {last} steps, and of the validation
loss at the end on decoded parameters, which the next forward pass would see, and on exact ones,
which a checkpoint holds. A scale for a shard, the rotation at more than 4 bits and error
feedback of parameters are no settings of the product; they are here for comparison. Ways and bits
of which no run has finished are left out.

![error and loss against bits](gathers.png)

| bits | way | bits on the wire | error | gap % | by seed | valid gap % | on exact parameters |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """One way at one number of bits, over all seeds of the native run."""

    way: str
    bits: int
    wire: float  # bits of a value on the wire
    error: float
    gaps: tuple[float, ...]  # per cent, of the last tenth of the steps, by seed
    valid: float  # per cent, mean of the seeds
    valid_exact: float


def rows_of(folder: Path) -> tuple[list[Row], int, list[int]]:
    """Rows, steps and seeds: those of the native run for which most ways are there.

    Raises FileNotFoundError without a native run.
    """
    seeds = sorted(int(file.stem.rpartition("seed")[2]) for file in folder.glob(f"{NATIVE}_seed*"))
    if not seeds:
        raise FileNotFoundError(f"{folder}: no {NATIVE}_seed*.json")
    native = {seed: _read(folder, NATIVE, seed) for seed in seeds}
    names = (_NAME.fullmatch(file.stem) for file in folder.glob("*.json"))
    found: dict[tuple[int, str], list[int]] = {}
    for match in names:
        if match and match["way"] in WORDS:
            found.setdefault((int(match["bits"]), match["way"]), []).append(int(match["seed"]))
    order = list(WORDS)
    cases = sorted(found, key=lambda case: (case[0], order.index(case[1])))
    rows = [_row(folder, *case, sorted(set(found[case]) & set(seeds)), native) for case in cases]
    return rows, native[seeds[0]]["steps"], seeds


def _read(folder: Path, name: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}_seed{seed}.json").read_text())
    return found


def _row(folder: Path, bits: int, way: str, seeds: list[int], native: dict[int, Any]) -> Row:
    runs = [(_read(folder, f"{way}_{bits}", seed), native[seed]) for seed in seeds]

    def gap(key: str) -> float:
        return float(statistics.mean(100 * (own[key] / base[key] - 1) for own, base in runs))

    return Row(
        way, bits, runs[0][0]["bits"], statistics.mean(own["error"] for own, _ in runs),
        tuple(100 * (_final(own) / _final(base) - 1) for own, base in runs),
        gap("valid"), statistics.mean(
            100 * (own["valid_exact"] / base["valid_exact"] - 1) for own, base in runs
        ),
    )  # fmt: skip


def _final(run: dict[str, Any]) -> float:
    return float(statistics.mean(run["losses"][-max(1, run["steps"] // 10) :]))


def chapter(folder: Path, out: Path) -> str:
    """The chapter in Markdown, with ``gathers.png`` in ``out``. Raises FileNotFoundError."""
    rows, steps, seeds = rows_of(folder)
    draw(rows, out / "gathers.png")
    listed = ", ".join(map(str, seeds))
    head = HEAD.format(steps=steps, seeds=listed, last=max(1, steps // 10))
    lines = [
        f"| {row.bits} | {WORDS[row.way]} | {row.wire:.2f} | {row.error:.1e} | "
        f"{statistics.mean(row.gaps):+.2f} | {', '.join(f'{gap:+.2f}' for gap in row.gaps)} | "
        f"{row.valid:+.2f} | {row.valid_exact:+.2f} |"
        for row in rows
    ]
    tail = f"""
```
scripts/prepare_data.py --output data/text
scripts/studies/gather_study.py --steps {steps} --seeds {" ".join(map(str, seeds))}
scripts/bench/results.py --gathers runs/gather_study
```"""
    return "\n".join([head, *lines, tail])


def draw(rows: list[Row], picture: Path) -> None:
    """Error and gap against the bits on the wire, a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for way in WORDS:
        own = [row for row in rows if row.way == way]
        if not own:
            continue
        style = "--" if way.endswith("feedback") else "-"
        wire = [row.wire for row in own]
        label = WORDS[way].replace("`", "")
        left.plot(wire, [row.error for row in own], style, marker="o", label=label)
        gaps = [statistics.mean(row.gaps) for row in own]
        right.plot(wire, gaps, style, marker="o", label=label)
    left.set(yscale="log", xlabel="bits a value", ylabel="relative error of the parameters")
    right.set(xlabel="bits a value", ylabel="training loss over that on exact parameters, %")
    right.axhline(0, color="grey", lw=1)
    left.grid(alpha=0.3)
    right.grid(alpha=0.3)
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)
