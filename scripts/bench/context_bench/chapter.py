"""The chapter of docs/results/ on long sequences: attention over ranks, and token slices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.context_bench import report
from bench.context_bench.slices_table import against
from bench.context_bench.slices_table import table as slices_table
from bench.training_bench.chapters import need

#: codecs that the picture shows, and their lines
DRAWN = {"native": "-", "8 bits": "--"}
HEAD = """\
## A ring, Ulysses and gathered keys

One causal attention, forward and backward, over nodes that are network namespaces of one machine
(`scripts/netlab.py`), one rank to a node. There are fewer cores than ranks, so every rank plays one
on a slower processor: whatever its main thread computes takes the given times as long, and threads
that move bytes find a core as on machines of their own (`scripts/lab/slow_processors.py`). It is
then as fast beside the others as it is alone. The cores change between speeds that lie more than
half apart, each for itself, and a ring waits at every hop for the slowest rank: so blocks are timed
before, and then each lasts, on every rank, one and a half times as long as on the slowest one
(`--steady`, `scripts/bench/context_bench/steady.py`); codecs and messages take what they take.
For every length the links are set so that the bytes of the native ring need r times as long as its
computing does. All methods and codecs take turns, over links without limit and at every rate.

* *computing*: a pass of the same method with native messages, over links without limit.
* *allowed*: the least that the bytes of the row allow its method beside that computing. A ring
  hides its messages behind blocks, each behind one; the last block is computed after the last keys
  have come, and the last gradients travel when there is nothing left to compute. Ulysses and
  gathered keys wait for their messages.
  Bytes are those of frames: 1514 for each 1448 of a message.
* *used*: allowed over measured; the codec's own time counts against it.
* *overlap*: the longer of computing and the bytes over measured: a method that hides all of the
  shorter one behind the other has 1.
* *speed-up*: over the same method with native messages, the median of turns.
* *MB a rank*: of the rank that sends most. *error*: relative, of context and gradients together.
"""
SLICES = """\

## Token slices

One sequence, batch 1. "Chosen": what `--slices auto` of the example takes. Some slices at several
places and their messages are timed on all stages. The slices that the dynamic program finds by
these times, and the best equal ones, then run some real steps; the former are taken unless others
are faster in most turns. Then all ways take turns, those that are clearly slower the first few
only; a step is that of the slowest stage, the median of the turns. "Chosen / these": the median of
their ratios, turn by turn.{slower}
"""
SLOWER = (
    " There are fewer cores than stages, so all of them play stages that compute {slower:g} times "
    "slower, as above."
)


def chapter(source: Path, out: Path) -> str:
    """Tables of context.json and slices.json, and a picture. Raises FileNotFoundError."""
    kept = _read(need(source / "context.json", "bench/bench_context.py --out"))
    slices = _read(need(source / "slices.json", "bench/bench_slices.py --out"))
    slices["options"]["out"] = None  # a path of the machine that measured
    (out / "context.json").write_text(json.dumps([kept, slices], indent=1) + "\n")
    rows = report.with_figures(kept)
    draw(rows, out / "context.png")
    options = slices["options"]
    slower = SLOWER.format(**options) if options["slower"] > 1 else ""
    said = SLICES.format(slower=slower)
    return "\n".join(
        [
            HEAD,
            report.said(kept),
            "\n![milliseconds of a pass by length](context.png)\n",
            report.table(rows),
            verdict(rows),
            said,
            _about(slices),
            "",
            slices_table(slices["rows"]),
            slices_verdict(slices),
            commands(kept["options"], options),
        ]
    )


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many rows of the ring reach nine tenths of what their bytes allow."""
    ring = [row for row in rows if row["method"] == "ring"]
    reached = sum(row["used"] >= 0.9 for row in ring)
    worst = min(ring, key=lambda row: row["used"])
    return (
        f"\n{reached} of {len(ring)} rows of the ring reach nine tenths of what their bytes allow; "
        f"the furthest off is {worst['codec']} at {worst['length']} tokens and r "
        f"{worst['ratio']:g}: {worst['used']:.0%}."
    )


def slices_verdict(slices: Mapping[str, Any]) -> str:
    """How the chosen slices stand beside the best of the others and what was predicted."""
    rows, chosen = slices["rows"], slices["rows"]["chosen"]
    others = {name: row["measured_s"] for name, row in rows.items() if name != "chosen"}
    best = min(others, key=lambda name: others[name])
    middle, low, high = against(rows, best)
    tried = ", ".join(_tried(way, slices["options"]["granule"]) for way in slices["tried"])
    whole, _, _ = against(rows, "whole")
    return (
        f"\nThe chosen slices took {middle:.2f} times ({low:.2f} to {high:.2f}) as long as {best}, "
        f"the fastest of the others, {whole:.2f} times as long as the whole, and "
        f"{chosen['measured_s'] / chosen['predicted_s']:.2f} times what was predicted. The trials "
        f"before, by which they were chosen: {tried}."
    )


def _tried(way: Mapping[str, Any], granule: int) -> str:
    """A way of slicing and what its trial took."""
    lengths, took = way["slices"], way["seconds"]
    even = max(lengths) - min(lengths) <= granule
    name = f"uniform {len(lengths)}" if even else f"{len(lengths)} slices of the program"
    return f"{name} without any other" if took is None else f"{name} {1e3 * took:.0f} ms"


def _about(slices: Mapping[str, Any]) -> str:
    options = slices["options"]
    return (
        f"{slices['stages']} stages of {options['layers']} layers, width {options['width']}, "
        f"{options['heads']} heads, {options['length']} tokens in multiples of "
        f"{options['granule']}, fp32."
    )


def commands(context: Mapping[str, Any], slices: Mapping[str, Any]) -> str:
    """What makes this page anew."""
    lengths = " ".join(map(str, context["lengths"]))
    codecs = " ".join(f'"{name}"' if " " in name else name for name in context["codecs"])
    steady = " --steady" if context.get("steady") else ""
    slower, own = (f" --slower {options['slower']:g}" for options in (context, slices))
    return f"""
## Commands

```
scripts/bench/bench_context.py --lengths {lengths} --heads {context["heads"]} \\
    --kept {context["kept"]} --width {context["width"]} --codecs {codecs} \\
    --rounds {context["rounds"]}{slower}{steady} --out runs/context/context.json
scripts/bench/bench_slices.py --length {slices["length"]} --width {slices["width"]} \\
    --heads {slices["heads"]} --layers {slices["layers"]} --granule {slices["granule"]} \\
    --repeats {slices["repeats"]}{own} --out runs/context/slices.json
scripts/bench/results.py --context runs/context
```"""


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Milliseconds against tokens, a panel for each r."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ratios = sorted({row["ratio"] for row in rows})
    figure, panels = plt.subplots(
        1, len(ratios), figsize=(4.6 * len(ratios), 4.2), constrained_layout=True, squeeze=False
    )
    colors = {method: f"C{number}" for number, method in enumerate(report.METHODS)}
    for axes, ratio in zip(panels[0], ratios, strict=True):
        for method in report.METHODS:
            for codec, style in DRAWN.items():
                own = [
                    r
                    for r in rows
                    if (r["ratio"], r["method"], r["codec"]) == (ratio, method, codec)
                ]
                axes.plot(
                    [row["length"] for row in own], [1e3 * row["measured"] for row in own], style,
                    color=colors[method], marker="o", markersize=3.5, label=f"{method}, {codec}",
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["length"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("tokens of the sequence")
        axes.set_title(f"native ring: bytes take {ratio:g} x computing")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("ms, forward and backward")
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
