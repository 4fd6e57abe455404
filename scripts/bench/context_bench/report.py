"""What the bytes of attention over ranks allow, and tables of what was measured beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

METHODS = ("ring", "Ulysses", "gather")
#: what a link carries for each byte of a message: frames of 1514 bytes hold 1448, behind the
#: headers of Ethernet, IP and TCP
FRAMES = 1514 / 1448
HEAD = (
    "tokens",
    "r",
    "Mb/s",
    "method",
    "codec",
    "MB a rank",
    "of native",
    "error",
    "computing ms",
    "allowed ms",
    "measured ms",
    "used",
    "overlap",
    "speed-up",
)


def allowed(
    method: str, ranks: int, computing: Sequence[float], wire: Sequence[float], keys: float
) -> float:
    """The least seconds of both passes.

    Ulysses and gathered keys wait for their messages. A ring of N ranks computes N blocks; in each
    pass keys and values come N - 1 times, each behind a block, and the last block is computed after
    the last of them. In the backward pass the gradients of a block, but for those of the rank's own
    keys, travel behind the next one, beside its keys, and those of the last block behind nothing.

    Args:
        method: one of ``METHODS``.
        ranks: N.
        computing, wire: seconds of the blocks and of the bytes, in the forward and the backward
            pass.
        keys: of the seconds of the backward wire those of keys and values.
    """
    if method != "ring" or ranks == 1:
        return sum(computing) + sum(wire)
    hops, first, second = ranks - 1, computing[0] / ranks, computing[1] / ranks
    forward = hops * max(first, wire[0] / hops) + first
    hop, gradients = keys / hops, (wire[1] - keys) / hops
    behind = [hop * (step < hops) + gradients * (step > 1) for step in range(ranks)]
    return forward + sum(max(second, each) for each in behind) + gradients


def figures(row: Mapping[str, Any], native: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """Of a row; ``native``: the one of the same method, length and rate."""
    computing = _medians(native["free"])
    wire = [8 * FRAMES * nbytes / row["rate"] for nbytes in row["nbytes"]]
    parts = computing[0], computing[1] - computing[0]
    least = allowed(row["method"], ranks, parts, wire, wire[0])  # keys go round alike
    took = _medians(row["seconds"])[1]
    pairs = zip(native["seconds"], row["seconds"], strict=True)
    return {
        "computing": computing[1],
        "allowed": least,
        "measured": took,
        "used": least / took,
        "overlap": max(computing[1], sum(wire)) / took,
        "speed_up": statistics.median(one[1] / other[1] for one, other in pairs),
        "of_native": sum(row["nbytes"]) / sum(native["nbytes"]),
    }


def _medians(pairs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of the forward pass and of both."""
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def with_figures(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows, each with its figures."""
    rows: list[dict[str, Any]] = kept["rows"]
    place = ("length", "ratio", "method")
    native = {tuple(r[key] for key in place): r for r in rows if r["codec"] == "native"}
    nodes, _, each = kept["options"]["layout"].partition("x")
    ranks = sum(map(int, nodes.split("+"))) * int(each or 1)
    return [
        {**row, **figures(row, native[tuple(row[key] for key in place)], ranks)} for row in rows
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of rows with figures."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows:
        error = "-" if row["codec"] == "native" else f"{row['error']:.1e}"
        cells = [
            str(row["length"]), f"{row['ratio']:g}", f"{row['rate'] / 1e6:.1f}", row["method"],
            row["codec"], f"{sum(row['nbytes']) / 1e6:.3f}", f"{row['of_native']:.3f}", error,
            *(f"{1e3 * row[key]:.0f}" for key in ("computing", "allowed", "measured")),
            f"{row['used']:.2f}", f"{row['overlap']:.2f}", f"{row['speed_up']:.2f}x",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def said(kept: Mapping[str, Any]) -> str:
    """What was measured and how, in a sentence."""
    options = kept["options"]
    slower = f", {options['slower']:g} times slower" if options["slower"] > 1 else ""
    return (
        f"{options['layout']} nodes{slower}; {options['heads']} heads of {options['width']}, "
        f"{options['kept']} of keys, {options['dtype']}, causal, forward and backward; medians of "
        f"{options['rounds']} rounds; load of the machine before: {kept['load']:.2f}."
        + _steady(kept)
    )


def _steady(kept: Mapping[str, Any]) -> str:
    """Whether blocks were made to last equally long, and how many lasted longer."""
    if not kept["options"].get("steady"):
        return ""
    late = {row["length"]: f"{row['late']:.1%} at {row['length']}" for row in kept["rows"]}
    return f" Blocks that took longer than they were given: {', '.join(late.values())}."


def tables(kept: Mapping[str, Any]) -> str:
    """All rows of a file of bench_context.py as Markdown."""
    return f"{said(kept)}\n\n{table(with_figures(kept))}"
