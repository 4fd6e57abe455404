"""Page and pictures of what bench_scale.py left."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.loss_chapters import Missing
from bench.scale_bench.growth import Messages, growing, grows, table
from bench.scale_bench.trained import misses
from hybridcomp.config.memory import size

Row = dict[str, Any]
HEAD = """\
What one rank pays from 2 to 4,096 ranks, **measured** without a wire; what steps of large models
take on 8 to 4,096 GPUs, **by the planner's model**; and how far that model is off at trainings of
a few ranks on one machine.
"""
HOST = """## Host time, launches, messages: measured

One rank's step with one micro-batch, by the functions that hybridcomp puts in the place of the
engines' own, which get the tensors that an engine would give them for {blocks} blocks of a
transformer; kernels are launched into nothing and messages arrive at once
(`scripts/bench/scale_bench/`). Gradients have 4 bits and error feedback, all else 8 bits.
{machine}, one core of a machine that others used at the same time, which only lengthens what is
measured: microseconds of the processor, lower quartiles of the steps; medians are in the picture
too, all quartiles in `scale.json`. The tensors are short, as what torch does with them on a CPU
would be a GPU's work; what is left of it is in these figures.

![host time of a step against ranks](scale_host.png)

{us}

The first step of a process makes plans, tables and residuals (milliseconds of the processor). Among
so many ranks these are so many objects that Python's garbage collector looks through all that torch
has imported, which takes 0.2 s of the figures above that:

{first}

Launches of codecs, messages, and operations of torch that launch a kernel:

{counts}
"""
BYTES = """## Bytes and memory of a rank

By a block of width {width} ({values} million values), 16 bits, micro-batches of {tokens} tokens.
On the wire, as a share of what native sends:

{wire}

Payloads under way at most, in MB; then what error feedback keeps, and the file of a rank beside a
checkpoint (bytes, tensors in it):

{buffers}

{residuals}
"""
PLANS = """## Large models, by the planner's model

Nothing here is measured. GPUs of {tflops:g} TFLOP/s reached in matrix products, {memory:g} GB,
nodes of {per_node} with {inside:g} GB/s inside, each GPU with a link of 25, 100 or 400 Gb/s to
other nodes, codecs at {codec:g} GB/s of native values; 20 µs a launch and the host's time of a
message, {us:g} µs and {per_rank:g} ns for each rank of its group, as if nothing hid it. Four
million tokens a step, tensor parallelism inside of a node, layouts of replicas, up to {stages}
stages, ZeRO 0 to 3, micro-batches up to {micro}, recomputation where memory asks for it.
*native*: the fastest layout without compression; *recommended*: that layout with the preset on
all that it compresses; *auto*: that layout, dimensions that are slower encoded left native;
*planned*: the layout that is fastest with *auto*. Seconds of a step, and how many times as fast
as native.

![steps against GPUs](scale_plans.png)

{tables}

The host's time of a message is in *recommended* with {host} of a step at most. The preset encodes
activations of tensor parallelism inside of nodes as well, where the links are faster than codecs:
*auto* leaves them native, which is what `"when": "auto"` is for.
"""
TRAINED = """## The model against trainings

{trained}

Each row: DeepSpeed trains {blocks} blocks of a transformer, predicted from `hybridcomp measure`
on the same ranks, which has seen one and three blocks. All ranks are processes of one machine
with two cores, which {shared} ranks share, in the measurement as in the training; others used the
machine at the same time (the shortest and longest step say how much). The model misses by
{median} in the median and by {most} at most.
{lacks}"""
COMMANDS = """## Commands

```
python scripts/bench/bench_scale.py host --out runs/scale
python scripts/bench/bench_scale.py plans --out runs/scale
python scripts/bench/bench_scale.py trainings --out runs/scale
python scripts/bench/bench_host.py --ranks 8 64 256 1024 4096 --megabytes 1 \\
    --json runs/scale/messages.json
python scripts/bench/results.py --scale runs/scale
```
"""


def scale_chapter(source: Path, out: Path) -> str:
    """Write pictures and ``scale.json``; return the page. Raises Missing without host.json."""
    names = ("host", "plans", "trainings", "messages")
    found = {name: _read(source / f"{name}.json") for name in names}
    if found["host"] is None:
        raise Missing(f"{source}: no host.json")
    (out / "scale.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    parts = [HEAD, *_measured(found["host"], found["messages"], out)]
    if found["plans"] is not None:
        parts.append(_planned(found["plans"]["rows"], out))
    if found["trainings"] is not None:
        parts.append(_trained(found["trainings"]["rows"]))
    return "\n".join([*parts, COMMANDS]).rstrip()


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _by_ranks(rows: Sequence[Row], first: str, cell: Callable[[Row], str]) -> str:
    """Return a table with a row for each engine and a column for each number of ranks."""
    ranks = sorted({row["ranks"] for row in rows})
    known = {(row["engine"], row["ranks"]): cell(row) for row in rows}
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    body = [[name, *(known.get((name, count), "-") for count in ranks)] for name in engines]
    return table([first, *(f"{count:,}" for count in ranks)], body)


def _measured(found: Row, messages: Messages | None, out: Path) -> Iterator[str]:
    from bench.scale_bench.figures import LARGE, SMALL

    rows: list[Row] = found["rows"]
    sums = [row for row in rows if row["residuals"]]
    yield HOST.format(
        blocks=SMALL.blocks, machine=found["machine"],
        us=_by_ranks(rows, "µs of a step", lambda row: f"{row['low']:,.0f}"),
        first=_by_ranks(rows, "ms of the first step", lambda row: f"{row['first_ms']:,.1f}"),
        counts=_by_ranks(
            rows, "launches, messages, torch",
            lambda row: f"{row['launches']}, {row['messages']}, {row['operations']}",
        ),
    )  # fmt: skip
    if messages is not None:
        yield growing(messages)
    values = sum(_numel(shape) for _, shape in LARGE.parameters(0)) / 1e6
    yield BYTES.format(
        width=f"{LARGE.width:,}", values=f"{values:,.0f}", tokens=f"{LARGE.tokens:,}",
        wire=_by_ranks(
            rows, "bytes to native", lambda row: f"{row['nbytes'] / row['native_nbytes']:.3f}"
        ),
        buffers=_by_ranks(
            [row for row in rows if row["buffers"]], "MB of payloads",
            lambda row: f"{row['buffers'] / 1e6:,.0f}",
        ),
        residuals=_by_ranks(
            sums, "residuals; file",
            lambda row: f"{size(row['residuals'])}; {size(row['file'])} ({row['tensors']})",
        ),
    )  # fmt: skip
    yield grows(rows)
    _draw_host(rows, out / "scale_host.png")


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for one in shape:
        found *= one
    return found


def _draw_host(rows: Sequence[Row], path: Path) -> None:
    plot = _pyplot()
    figure, axes = plot.subplots(figsize=(7, 4.2), constrained_layout=True)
    for name in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == name]
        ranks = [row["ranks"] for row in own]
        low, median = ([row[end] for row in own] for end in ("low", "us"))
        (line,) = axes.plot(ranks, low, marker="o", label=name)
        axes.fill_between(ranks, low, median, alpha=0.15, color=line.get_color(), linewidth=0)
    ticks = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.set_xlabel("ranks")
    axes.set_ylabel("µs of a step: lower quartile to median")
    axes.set_title("Host time of a step, measured without a wire", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=130)
    plot.close(figure)


def _planned(rows: Sequence[Row], out: Path) -> str:
    from bench.scale_bench import planned
    from hybridcomp.plan.machines.described import HostSpeed

    host = HostSpeed()
    fits = [row for row in rows if "native" in row]
    names = list(dict.fromkeys(row["model"] for row in rows))
    _draw_plans(fits, names, out / "scale_plans.png")
    share = max(row["host_of_recommended"] / row["recommended"] for row in fits)
    return PLANS.format(
        tflops=planned.TFLOPS, memory=planned.MEMORY_GB, per_node=planned.PER_NODE,
        inside=planned.INSIDE, codec=planned.CODEC, us=host.us, per_rank=1e3 * host.us_per_rank,
        stages=planned.MOST_STAGES, micro=planned.MOST_MICRO, host=f"{100 * share:.1f} %",
        tables="\n\n".join(_plan_table(name, rows) for name in names),
    )  # fmt: skip


def _plan_table(name: str, rows: Sequence[Row]) -> str:
    from bench.scale_bench.planned import GPUS, RATES

    body = []
    for row in rows:
        if row["model"] != name:
            continue
        first = [f"{row['gpus']:,}", f"{row['gbits']:g}"]
        if "native" not in row:
            body.append([*first, row["reason"], *["-"] * 6])
            continue
        speeds = [f"{row['native'] / row[way]:.2f}" for way in ("recommended", "auto", "planned")]
        encodes = ", ".join(row["auto_encodes"]) or "nothing"
        body.append([*first, row["layout"], f"{row['native']:.2f}", speeds[0], speeds[1], encodes,
                     speeds[2], row["planned_layout"]])  # fmt: skip
    head = ["GPUs", "Gb/s", f"{name}: native layout", "s", "recommended", "auto", "auto encodes",
            "planned", "its layout"]  # fmt: skip
    known = {(row["gpus"], row["gbits"]) for row in rows if row["model"] == name}
    lacks = [
        f"{gpus:,} GPUs at {rate} Gb/s" for gpus in GPUS for rate in RATES
        if (gpus, rate) not in known
    ]  # fmt: skip
    told = f"\n\nNot planned: {', '.join(lacks)}." if lacks else ""
    return table(head, body) + told


def _draw_plans(rows: Sequence[Row], names: Sequence[str], path: Path) -> None:
    plot = _pyplot()
    rates = sorted({row["gbits"] for row in rows})
    figure, panels = plot.subplots(
        1, len(names), figsize=(5 * len(names), 4.2), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes, name in zip(panels[0], names, strict=True):
        for rate, color in zip(rates, ("tab:red", "tab:orange", "tab:blue"), strict=False):
            own = [row for row in rows if row["model"] == name and row["gbits"] == rate]
            for way, style in (("recommended", ":"), ("auto", "--"), ("planned", "-")):
                axes.plot(
                    [row["gpus"] for row in own], [row["native"] / row[way] for row in own], style,
                    color=color, marker="o", markersize=4, label=f"{way}, {rate:g} Gb/s",
                )  # fmt: skip
        ticks = sorted({row["gpus"] for row in rows})
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
        axes.set_title(f"{name} (a model, not measured)", fontsize=10)
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("times as fast as native")
    panels[0][0].legend(fontsize=7, handlelength=4)
    figure.savefig(path, dpi=130)
    plot.close(figure)


def _trained(rows: Sequence[Row]) -> str:
    from bench.bench_scale import TRAINED as WANTED
    from bench.scale_bench.trained import BLOCKS

    off = misses(rows)
    body = [
        [f"{row['ranks']}", f"ZeRO {row['zero']}, {row['name']}", f"{row['predicted_s']:.2f}",
         f"{row['measured_s']:.2f} ({row['low_s']:.2f} to {row['high_s']:.2f})",
         f"{100 * miss:+.0f} %"]
        for row, miss in zip(rows, off, strict=True)
    ]  # fmt: skip
    lacking = [str(ranks) for ranks in WANTED if ranks not in {row["ranks"] for row in rows}]
    lacks = f"Not trained: {', '.join(lacking)} ranks.\n" if lacking else ""
    sizes = [abs(miss) for miss in off]
    head = ["ranks", "training", "predicted s", "measured s", "miss"]
    return TRAINED.format(
        trained=table(head, body), blocks=BLOCKS, lacks=lacks,
        shared=f"up to {max(row['ranks'] for row in rows)}",
        median=f"{100 * statistics.median(sizes):.0f} %", most=f"{100 * max(sizes):.0f} %",
    )  # fmt: skip
