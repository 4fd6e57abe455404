"""Cells as a table: speed-up over native bf16, what the wire allows, the share of it reached."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from training_bench.cells import REFERENCE

Record = dict[str, Any]


def ideal(ratio: float, saving: float) -> float:
    """The speed-up when nothing but bytes changes: (1 + r) / (1 + r / saving).

    ``ratio``: communication to compute of native bf16; ``saving``: its bytes over the arm's.
    """
    return (1 + ratio) / (1 + ratio / saving) if saving else 1.0


def rows_of(records: Sequence[Record]) -> list[Record]:
    """One row for each layout, ratio and arm, paired with the reference by repetition."""
    groups: dict[tuple[Any, ...], dict[int, Record]] = defaultdict(dict)
    for record in records:
        key = (record["layout"], record["ratio"], record["arm"])
        groups[key][record["repetition"]] = record
    rows = []
    for (layout, ratio, arm), cells in groups.items():
        reference = groups[layout, ratio, REFERENCE]
        failed = [cell["failed"] for cell in cells.values() if "failed" in cell]
        pairs = [
            (cell, reference[number])
            for number, cell in sorted(cells.items())
            if number in reference and "failed" not in cell and "failed" not in reference[number]
        ]
        row: Record = {"layout": layout, "r": ratio, "arm": arm}
        if failed or not pairs:
            rows.append({**row, "failed": failed[0] if failed else "no pair to compare"})
            continue
        own = [cell for cell, _ in pairs]
        ups = [native["seconds"] / cell["seconds"] for cell, native in pairs]
        sent = statistics.median(cell["sent"] for cell in own)
        native_sent = statistics.median(native["sent"] for _, native in pairs)
        saving = native_sent / sent if sent else None  # a loopback: nobody counted
        row |= {
            "rate": own[0]["rate"],
            "seconds": statistics.median(cell["seconds"] for cell in own),
            "tokens_per_second": statistics.median(c["tokens"] / c["seconds"] for c in own),
            "sent_MB": sent / 1e6,
            "saving": saving,
            "speed_up": statistics.median(ups),
            "low": min(ups),
            "high": max(ups),
            "loss": statistics.fmean(cell["loss"] for cell in own),
            "codec_s": statistics.median(cell["codec_s"] for cell in own),
            "rounds": statistics.median(cell["rounds"] for cell in own),
            "repetitions": len(pairs),
            "burst_ms": own[0].get("burst_ms"),
            "busy": max(cell["busy"] for pair in pairs for cell in pair),
        }
        if ratio is not None and saving:
            row["ideal"] = ideal(ratio, saving)
            row["share"] = row["speed_up"] / row["ideal"]
        rows.append(row)
    return rows


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
)


def table(rows: Sequence[Record], layout: str) -> str:
    """Markdown, one layout."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows:
        if row["layout"] == layout:
            lines.append("| " + " | ".join(_cells(row)) + " |")
    return "\n".join(lines)


def _cells(row: Record) -> list[str]:
    name = "none" if row["r"] is None else f"{row['r']:g}"
    if "failed" in row:
        return [name, "", row["arm"], *[""] * 6, row["failed"].replace("|", "/")]
    rate = "-" if row["rate"] is None else f"{row['rate'] / 1e6:.1f}"
    spread = "" if row["repetitions"] < 2 else f" ({row['low']:.2f} to {row['high']:.2f})"
    saved = f"{row['saving']:.2f}x fewer" if row["saving"] else "-"
    allowed = f"{row['ideal']:.2f}: {row['share']:.0%}" if "ideal" in row else "-"
    return [
        name, rate, row["arm"], f"{row['sent_MB']:.3f}", saved,
        f"{row['seconds'] * 1e3:.0f}", f"{row['tokens_per_second']:.0f}",
        f"{row['speed_up']:.2f}x{spread}", allowed, f"{row['loss']:.3f}",
    ]  # fmt: skip
