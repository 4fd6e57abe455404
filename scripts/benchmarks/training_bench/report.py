"""Tabulate cells: speed-up over native bf16, the speed-up that bytes allow, share reached."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from math import comb
from typing import Any

from benchmarks.shared import table
from benchmarks.training_bench.cells import REFERENCE

Record = dict[str, Any]


def ideal(ratio: float, saving: float) -> float:
    """Return the speed-up if only bytes change: (1 + r) / (1 + r / saving).

    ``ratio``: native bf16's communication time over its compute time; ``saving``: native bf16's
    bytes over the arm's.
    """
    return (1 + ratio) / (1 + ratio / saving) if saving else 1.0


def rows_of(records: Sequence[Record]) -> list[Record]:
    """Return one row for each layout, ratio and arm.

    Uses the steps of all repetitions, each paired with the reference's step of the same turn.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["layout"], record["ratio"], record["arm"]].append(record)
    rows = []
    for (layout, ratio, arm), found in groups.items():
        row: Record = {"layout": layout, "r": ratio, "arm": arm}
        failed = [cell["failed"] for cell in found if "failed" in cell]
        rows.append({**row, "failed": failed[0]} if failed else row | _figures(found))
    return rows


def _figures(own: Sequence[Record]) -> Record:
    """Return the figures of a row from its cells."""
    ups = [n / s for cell in own for n, s in zip(cell["native"], cell["steps"], strict=True)]
    sent = statistics.median(cell["sent"] for cell in own)
    native_sent = statistics.median(cell["native_sent"] for cell in own)
    saving = native_sent / sent if sent else None  # nothing is counted on a loopback
    row: Record = {
        "rate": statistics.median(cell["rate"] for cell in own) if own[0]["rate"] else None,
        "seconds": statistics.median(step for cell in own for step in cell["steps"]),
        "sent_MB": sent / 1e6,
        "saving": saving,
        "loss": statistics.fmean(cell["loss"] for cell in own),
        **speed_up(ups),
        "repetitions": len(own),
        "burst_ms": own[0]["burst_ms"],
        "busy": max(cell["busy"] for cell in own),
    }
    row["tokens_per_second"] = own[0]["tokens"] / row["seconds"]
    if row["rate"] and saving:
        # r and compute time as measured in the same turns as these cells
        shares = [8 * cell["native_sent"] / cell["rate"] / statistics.median(cell["compute"])
                  for cell in own]  # fmt: skip
        row["r_measured"] = statistics.median(shares)
        row["compute_s"] = statistics.median(step for cell in own for step in cell["compute"])
        row["ideal"] = ideal(row["r_measured"], saving)
        row["share"] = row["speed_up"] / row["ideal"]
    return row


def speed_up(pairs: Sequence[float]) -> Record:
    """Return the median of ``pairs``, native time over the arm's, and its 95 % interval."""
    ordered, out = sorted(pairs), outside(len(pairs))
    return {
        "speed_up": statistics.median(ordered), "low": ordered[out], "high": ordered[-1 - out],
        "pairs": len(ordered),
    }  # fmt: skip


def outside(count: int) -> int:
    """Return how many of ``count`` sorted values lie outside the median's 95 % interval, per end.

    Source: order statistics, binomial with p = 1/2; 0 below 6 values.
    """
    out, tail = 0, 0.5**count
    while tail + comb(count, out + 1) * 0.5**count <= 0.025:
        out += 1
        tail += comb(count, out) * 0.5**count
    return out if tail <= 0.025 else 0


HEAD = (
    "r",
    "Mb/s",
    "arm",
    "MB/step",
    "bytes",
    "ms/step",
    "tokens/s",
    "speed-up",
    "of ideal",
    "loss",
    "pairs",
)


def table_of(rows: Sequence[Record], layout: str) -> str:
    """Return the table of a layout."""
    return "\n".join(table(HEAD, (_cells(row) for row in rows if row["layout"] == layout)))


def _cells(row: Record) -> list[str]:
    name = "none" if row["r"] is None else f"{row['r']:g}"
    if "r_measured" in row:
        name += f" ({row['r_measured']:.2f})"
    if "failed" in row:
        return [name, "", row["arm"], *[""] * 6, row["failed"].replace("|", "/"), ""]
    rate = "-" if row["rate"] is None else f"{row['rate'] / 1e6:.1f}"
    spread = f" ({row['low']:.2f} to {row['high']:.2f})" if row["arm"] != REFERENCE else ""
    saved = f"{row['saving']:.2f}x fewer" if row["saving"] else "-"
    allowed = f"{row['ideal']:.2f}: {row['share']:.0%}" if "ideal" in row else "-"
    return [
        name, rate, row["arm"], f"{row['sent_MB']:.3f}", saved,
        f"{row['seconds'] * 1e3:.0f}", f"{row['tokens_per_second']:.0f}",
        f"{row['speed_up']:.2f}x{spread}", allowed, f"{row['loss']:.3f}", str(row["pairs"]),
    ]  # fmt: skip
