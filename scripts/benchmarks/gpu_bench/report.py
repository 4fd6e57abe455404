"""Write the JSON, and what it shares with the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.measure import Point
from benchmarks.gpu_bench.published import PUBLISHED
from benchmarks.gpu_bench.targets import target_of


def published() -> list[str]:
    """Return lines of published speeds that are not measured here."""
    found = ["published, not measured here (GB/s of values, on the authors' card)"]
    return found + [
        f"{p.subject:22} encode {p.encode_gbps:.0f}, decode {p.decode_gbps:.0f} on {p.gpu} "
        f"({p.what}): {p.source}"
        for p in PUBLISHED
    ]


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
