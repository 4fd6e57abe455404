"""Draw the answer: speed against bytes, memory against the limit, the best plan's step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridcomp import escaping
from hybridcomp.dimensions import DIMENSIONS, ROWS
from hybridcomp.errors import HybridcompError, install_hint
from hybridcomp.tools.pages import links
from hybridcomp.tools.plan.answer.report import codecs
from hybridcomp.tools.plan.engines import runs
from hybridcomp.tools.plan.plan import MEMORY_KINDS, Plan, Span

#: distinct for colour-blind readers too (Okabe and Ito)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999",
           "#882255", "#000000", "#F0E442", "#44AA99", "#661100")  # fmt: skip
#: most rows of the timeline; more could not be read
MOST_ROWS = 24
#: fraction of an axis within which labels would overlap
NEAR = 0.04
#: inches
WIDTH, HEIGHT = 12.0, 9.0


def draw(
    plans: Sequence[Plan], limit: float, path: Path, title: str, native: Plan | None = None
) -> None:
    """Draw ``plans`` into the PNG ``path``. ``limit``: bytes of a device to fill, 0 if unknown.

    ``native``: the first plan's layout without compression.

    Raises HybridcompError when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise HybridcompError(f"the picture needs matplotlib: {install_hint('plot')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 1.0))
    _speed(figure.add_subplot(grid[0, 0]), plans, native)
    _memory(figure.add_subplot(grid[0, 1]), plans, limit)
    _timeline(figure.add_subplot(grid[1, :]), plans[0])
    figure.suptitle(escaping.picture(title))
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a glyph and draws a box
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_links(plan: Plan, nodes: int, ranks: int) -> str:
    """Return as SVG what the ranks of a node send in a step, inside it and to other nodes.

    ``nodes``, ``ranks``: numbers of nodes and ranks of the cluster. Raises HybridcompError where
    Jinja is not installed.
    """
    told, per_node = plan.prediction, ranks // nodes
    over = [name for name in DIMENSIONS if ROWS[name].between_ranks]
    whole = [sum(found.get(name, 0.0) for name in over) / nodes
             for found in (told.job_native_nbytes, told.job_nbytes)]  # fmt: skip
    crossing = [per_node * sum(found.get(name, 0.0) for name in over)
                for found in (told.between_native_nbytes, told.between_nbytes)]  # fmt: skip
    inside = [max(0.0, all_ - out) for all_, out in zip(whole, crossing, strict=True)]
    rows = [
        links.LinkMB("Inside a node, such as NVLink", inside[0] / 1e6, inside[1] / 1e6),
        links.LinkMB("Between nodes, such as Ethernet", crossing[0] / 1e6, crossing[1] / 1e6),
    ]
    return links.draw("MB that the ranks of a node send in a step", rows, nodes, per_node)


def between(plan: Plan) -> float:
    """Return the MB per step that a rank sends to other nodes; all MB if there is one node."""
    told = plan.prediction
    crosses = sum(told.between_native_nbytes.values())
    return sum((told.between_nbytes if crosses else told.nbytes).values()) / 1e6


def _speed(axes: Any, plans: Sequence[Plan], native: Plan | None) -> None:
    """Plot tokens a second, with their interval, against the bytes that go between nodes."""
    layouts = list(dict.fromkeys(str(plan.layout) for plan in plans))
    for plan in plans:
        told, x = plan.prediction, between(plan)
        colour = COLOURS[layouts.index(str(plan.layout)) % len(COLOURS)]
        tokens = told.tokens_per_second * told.seconds
        axes.plot([x, x], [tokens / told.high, tokens / told.low], color=colour, lw=1.5, alpha=0.6)
        axes.plot([x], [told.tokens_per_second], "o", color=colour)
    if native is not None:
        place = between(native), native.prediction.tokens_per_second
        axes.plot(*place, "s", color="black", markerfacecolor="white", label="1, native")
    for number, name in enumerate(layouts[: len(COLOURS)]):
        axes.plot([], [], "o", color=COLOURS[number], label=escaping.picture(name))
    crosses = any(sum(plan.prediction.between_native_nbytes.values()) for plan in plans)
    whither = "to other nodes" if crosses else "to other ranks"
    axes.set_xlabel(f"MB that a rank sends {whither} in a step")
    axes.set_ylabel("tokens a second, predicted")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    for (x, y), label in labels(plans, (axes.get_xlim()[1], axes.get_ylim()[1])).items():
        above = {"textcoords": "offset points", "xytext": (6, 5), "fontsize": 8}
        axes.annotate(label, (x, y), **above)
    axes.legend(fontsize=7, loc="lower left")
    axes.grid(alpha=0.25)
    axes.set_title(f"1: {plans[0].layout}\n{codecs(plans[0])}", fontsize=8)


def labels(plans: Sequence[Plan], ends: tuple[float, float]) -> dict[tuple[float, float], str]:
    """Return each label's place and plan numbers; plans closer than ``NEAR`` share a label.

    ``ends``: upper ends of the two axes.
    """
    found: dict[tuple[float, float], list[int]] = {}
    for number, plan in enumerate(plans, 1):
        x, y = between(plan), plan.prediction.tokens_per_second
        near = [
            place for place in found
            if abs(place[0] - x) <= NEAR * ends[0] and abs(place[1] - y) <= NEAR * ends[1]
        ]  # fmt: skip
        found.setdefault(near[0] if near else (x, y), []).append(number)
    return {place: _ranges(numbers) for place, numbers in found.items()}


def _ranges(numbers: Sequence[int]) -> str:
    """Format ``1-5, 8`` of ascending numbers."""
    ends = ((start, stop - 1) for start, stop in runs(numbers))
    return ", ".join(f"{start}-{last}" if start < last else f"{start}" for start, last in ends)


def _memory(axes: Any, plans: Sequence[Plan], limit: float) -> None:
    """Plot the device memory, by kind, of the rank that uses most, and the limit."""
    below = [0.0] * len(plans)
    numbers = list(range(1, len(plans) + 1))
    kinds = [kind for kind in MEMORY_KINDS if kind != "host"]
    for kind, colour in zip(kinds, COLOURS, strict=False):
        values = [plan.prediction.memory.get(kind, 0.0) / 1e9 for plan in plans]
        if any(values):
            axes.bar(numbers, values, bottom=below, color=colour, label=kind)
            below = [a + b for a, b in zip(below, values, strict=True)]
    if limit:
        axes.axhline(limit / 1e9, color="black", lw=1.2, ls="--", label="limit")
    axes.set_xticks(numbers)
    axes.set_xlabel("plan")
    axes.set_ylabel("GB of the fullest rank")
    axes.set_ylim(top=1.3 * max([*below, limit / 1e9]))  # keep the legend from covering the bars
    axes.legend(fontsize=7, ncols=4, loc="upper center")
    axes.grid(alpha=0.25, axis="y")


def _timeline(axes: Any, plan: Plan) -> None:
    """Plot the predicted step of the best plan: a row a resource, a colour a kind of task."""
    spans = plan.prediction.spans
    if not spans:
        axes.text(0.5, 0.5, "no timeline", ha="center")
        return
    rows = list(dict.fromkeys(span.resource for span in spans))[:MOST_ROWS]
    kinds = list(dict.fromkeys(_kind(span) for span in spans))
    for span in spans:
        if span.resource in rows and span.end > span.start:
            axes.barh(
                rows.index(span.resource), 1e3 * (span.end - span.start), left=1e3 * span.start,
                height=0.8, color=COLOURS[kinds.index(_kind(span)) % len(COLOURS)],
                edgecolor="white", linewidth=0.3,
            )  # fmt: skip
    for number, kind in enumerate(kinds):
        axes.barh([0], [0], color=COLOURS[number % len(COLOURS)], label=kind)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms of one optimizer step, plan 1")
    axes.legend(
        fontsize=7, ncols=min(8, len(kinds)), loc="upper center", bbox_to_anchor=(0.5, 1.12)
    )


def _kind(span: Span) -> str:
    """Return a task's name without its number: ``forward`` of ``forward 3``, ``F`` of ``F3``."""
    return span.name.split(" ")[0].rstrip("0123456789") or span.name
