"""Read records of bench_gpu_training.py, of any number of calls, into rows and tables."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import table
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE
from benchmarks.training_bench.gpu_cells import COMPUTE, SIZES
from benchmarks.training_bench.report import ideal, speed_up

Record = dict[str, Any]
#: key of a session's round: records with equal keys are compared
Round = tuple[str, int]
#: prefixes of arms in which hybridcomp compresses nothing
NOT_OURS = ("native", COMPUTE, "peer", "ZeRO++")
#: targets: minimum share of the speed that an arm's bytes allow; for ``auto``, minimum share of the
#: speed of native or compressed, whichever is faster
SHARE, AUTO_SHARE = 0.90, 0.97
AUTO, ALWAYS = "recommended when auto", "recommended"


def rows_of(records: Sequence[Record]) -> list[Record]:
    """Return one row for each size, layout and arm: medians over all rounds of all calls."""
    places: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        places[record["size"], record["layout"]].append(record)
    order = {name: place for place, name in enumerate(LAYOUTS)}
    rows = []
    for size, layout in sorted(places, key=lambda key: (list(SIZES).index(key[0]), order[key[1]])):
        rows += _layout(size, layout, places[size, layout])
    return rows


def _layout(size: str, layout: str, records: Sequence[Record]) -> list[Record]:
    turns: dict[str, dict[Round, Record]] = defaultdict(dict)
    failed, ended = {}, {}
    for record in records:
        if record["kind"] == "round":
            continue
        arm = record["arm"]
        if record["kind"] == "turn":
            turns.setdefault(arm, {})
            if record["round"] >= 0:
                turns[arm][record["session"], record["round"]] = record
        elif record["kind"] == "failed":
            failed[arm] = record["why"]
        else:
            ended[arm] = record
    native, compute = turns[REFERENCE], turns[COMPUTE]
    devices = sorted({record["device"] for record in records})
    rows = []
    for arm in dict.fromkeys([*turns, *failed]):
        row: Record = {"size": size, "layout": layout, "arm": arm, "device": devices}
        if not any(place in native for place in turns[arm]):
            if arm in failed:
                rows.append({**row, "failed": failed[arm]})
            continue
        row |= _figures(turns[arm], native, compute, SIZES[size][2])
        row |= {
            name: ended[arm][name] for name in ("ledger", "auto") if ended.get(arm, {}).get(name)
        }
        rows.append(row)
    return rows


def _figures(
    own: dict[Round, Record], native: dict[Round, Record], compute: dict[Round, Record], length: int
) -> Record:
    """Return an arm's figures. ``length``: tokens per sample."""
    both = [place for place in own if place in native]
    pairs = [
        n / s
        for place in both
        for n, s in zip(native[place]["seconds"], own[place]["seconds"], strict=False)
    ]
    seconds = statistics.median(s for place in both for s in own[place]["seconds"])
    sent = statistics.median(own[place]["sent"] for place in both)
    native_sent = statistics.median(native[place]["sent"] for place in both)
    row: Record = {
        "ms": 1e3 * seconds,
        "tokens_per_second": own[both[0]]["samples"] * length / seconds,
        **speed_up(pairs),
        "sent_MB": sent / 1e6,
        "saving": native_sent / sent,
        "loss": own[both[-1]]["loss"],
    }
    with_compute = [place for place in both if place in compute]
    if with_compute:
        ratios = [_middle(native, place) / _middle(compute, place) - 1 for place in with_compute]
        row["r"] = max(0.0, statistics.median(ratios))
        row["compute_ms"] = 1e3 * statistics.median(_middle(compute, p) for p in with_compute)
        row["ideal"] = ideal(row["r"], row["saving"])
        row["share"] = row["speed_up"] / row["ideal"]
    return row


def _middle(turns: dict[Round, Record], place: Round) -> float:
    found: float = statistics.median(turns[place]["seconds"])
    return found


HEAD = ("arm", "ms a step", "tokens/s", "of native", "MB a step", "bytes", "allowed", "reached")


def _cells(row: Record) -> list[str]:
    if "failed" in row:
        return [row["arm"], f"failed: {row['failed'].replace('|', '/')[:160]}", *[""] * 6]
    name = f"`{row['arm']}`" if ours(row["arm"]) else row["arm"]
    found = [name, f"{row['ms']:.1f}", f"{row['tokens_per_second']:,.0f}"]
    if row["arm"] == REFERENCE:
        return [*found, "1", f"{row['sent_MB']:.1f}", "1", "", ""]
    if row["arm"] == COMPUTE:
        return [*found, f"{row['speed_up']:.2f}", f"{row['sent_MB']:.1f}", "", "", ""]
    found += [
        f"**{row['speed_up']:.2f}** ({row['low']:.2f} to {row['high']:.2f})",
        f"{row['sent_MB']:.1f}", f"1/{row['saving']:.2f}",
    ]  # fmt: skip
    return [
        *found,
        *([f"{row['ideal']:.2f}", f"{row['share']:.0%}"] if "ideal" in row else ["", ""]),
    ]


def ours(arm: str) -> bool:
    """Return whether hybridcomp compresses in ``arm``."""
    return not arm.startswith(NOT_OURS)


def auto_of(rows: Sequence[Record]) -> list[tuple[str, str, float]]:
    """Return size, layout, and the speed of ``auto`` over that of the faster fixed choice."""
    found = {(row["size"], row["layout"], row["arm"]): row for row in rows if "failed" not in row}
    return [
        (size, layout, row["speed_up"] / max(1.0, found[size, layout, ALWAYS]["speed_up"]))
        for (size, layout, arm), row in found.items()
        if arm == AUTO and (size, layout, ALWAYS) in found
    ]


def page(file: Path) -> str:
    """Return tables of all records in ``file``: targets, MISSED lines, then each layout's table."""
    rows = rows_of([json.loads(text) for text in file.read_text().splitlines()])
    devices = sorted({name for row in rows for name in row["device"]})
    parts = [f"On {', '.join(devices)}.", "", *verdict(rows), *missed(rows)]
    for size, layout in dict.fromkeys((row["size"], row["layout"]) for row in rows):
        own = [row for row in rows if (row["size"], row["layout"]) == (size, layout)]
        parts += ["", f"## {size} parameters, {layout}", "", *_told(own)]
        parts += table(HEAD, map(_cells, own))
    return "\n".join([*parts, ""])


def _told(rows: Sequence[Record]) -> list[str]:
    """Return lines with a layout's r and what ``auto`` reported."""
    found = [row for row in rows if "r" in row]
    lines = []
    if found:
        most = max(found, key=lambda row: row["pairs"])
        lines.append(f"Compute {most['compute_ms']:.1f} ms, r {most['r']:.2f}.\n")
    lines += [f"`{row['arm']}`: {text}\n" for row in rows for text in row.get("auto", [])]
    return lines


def missed(rows: Sequence[Record]) -> list[str]:
    """Return a line for each missed target."""
    found = [
        (row["size"], row["layout"], row["share"], "of what its bytes allow", ALWAYS, SHARE)
        for row in rows
        if row["arm"] == ALWAYS and "share" in row
    ]
    better = "of the better of native and compressed"
    found += [(*auto, better, AUTO, AUTO_SHARE) for auto in auto_of(rows)]
    return [
        f"MISSED {size} {layout}: {arm} {share:.2f} {what}, expected {aim:.2f}"
        for size, layout, share, what, arm, aim in found
        if share < aim
    ]


def verdict(rows: Sequence[Record]) -> list[str]:
    """Return the table of targets: SHARE for ``recommended``, AUTO_SHARE for ``auto``."""
    auto = {(size, layout): f"{value:.2f}" for size, layout, value in auto_of(rows)}
    cells = (
        (row["size"], row["layout"], f"{row['r']:.2f}", f"{row['speed_up']:.2f}",
         f"{row['share']:.2f}", auto.get((row["size"], row["layout"]), ""))
        for row in rows if "share" in row and row["arm"] == ALWAYS
    )  # fmt: skip
    head = (
        "model",
        "layout",
        "r",
        f"`{ALWAYS}`",
        "of what its bytes allow",
        "`auto` of the better",
    )
    return table(head, cells)
