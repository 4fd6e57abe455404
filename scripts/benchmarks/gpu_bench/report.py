"""Write the table and the JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.measure import Point
from benchmarks.gpu_bench.published import PUBLISHED
from benchmarks.gpu_bench.targets import below, target_of

HEADER = (
    f"{'subject':22} {'phase':25} {'bits':>6} {'us':>9} {'host us':>8} {'GB/s':>7} {'x copy':>7} "
    f"{'target':>7}"
)


def table(points: Sequence[Point]) -> str:
    """Return a block of lines for each message."""
    lines: list[str] = []
    for message in dict.fromkeys((p.message_nbytes, p.dtype) for p in points):
        lines += ["", f"{size_name(message[0])} of {message[1]}", HEADER, "-" * len(HEADER)]
        lines += [_line(p) for p in points if (p.message_nbytes, p.dtype) == message]
    return "\n".join(lines)


def published() -> list[str]:
    """Return lines of published speeds that are not measured here."""
    found = ["published, not measured here (GB/s of values, on the authors' card)"]
    return found + [
        f"{p.subject:22} encode {p.encode_gbps:.0f}, decode {p.decode_gbps:.0f} on {p.gpu} "
        f"({p.what}): {p.source}"
        for p in PUBLISHED
    ]


def _line(point: Point) -> str:
    wanted = target_of(point)
    verdict = ""
    if wanted is not None:
        verdict = f"{wanted:7.2f} {'MISSED' if below(point) else 'met'}"
    bits = f"{point.bits:6.2f}" if point.bits else " " * 6
    return (
        f"{point.subject:22} {point.phase:25} {bits} {point.seconds * 1e6:9.1f} "
        f"{point.host_us:8.1f} {point.gbps:7.0f} {point.share:7.2f} {verdict:>7}  {point.note}"
    ).rstrip()


def size_name(nbytes: int) -> str:
    """Format a size: 64 KB, 256 MB, 1 GB."""
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def write_json(path: Path, points: Sequence[Point], facts: dict[str, Any]) -> None:
    """Write ``facts`` (device, versions, skipped subjects, checks) and all points."""
    rows = [{**asdict(point), "target": target_of(point)} for point in points]
    found = {**facts, "published": [asdict(p) for p in PUBLISHED], "points": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
