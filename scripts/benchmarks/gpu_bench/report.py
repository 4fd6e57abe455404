"""Write the table, the JSON and the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.measure import Point
from benchmarks.gpu_bench.ours import codecs
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


#: phases that get a separate picture
PANELS = ("encode", "decode", "sum_encode")


def draw(path: Path, points: Sequence[Point], title: str) -> None:
    """Draw GB/s read and written over the message's size, below the roof of copies.

    The scale is linear, to show how far below the roof long messages stay.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(point.dtype for point in points))
    figure, axes = pyplot.subplots(
        len(dtypes), len(PANELS), figsize=(15, 5.2 * len(dtypes)), sharex=True, sharey=True,
        squeeze=False,
    )  # fmt: skip
    subjects = list(dict.fromkeys(p.subject for p in points if p.phase in PANELS))
    names = codecs()
    colors = pyplot.get_cmap("tab20").colors
    style: dict[str, dict[str, Any]] = {}
    for index, subject in enumerate(subjects):
        ours = subject in names
        style[subject] = {
            "color": colors[index % 20],
            "linestyle": "-" if ours else ":",
            "marker": "o" if ours else "x",
            "markersize": 4,
            "linewidth": 1.8 if ours else 1.2,
        }
    handles: dict[str, Any] = {}
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, phase in zip(row, PANELS, strict=True):
            _panel(axis, [p for p in points if p.dtype == dtype], phase, style, handles)
            axis.set_title(f"{phase.replace('_', ' ')}, {dtype}")
    for axis in axes[-1]:
        axis.set_xlabel("message")
    for row in axes:
        row[0].set_ylabel("GB/s read and written")
    figure.suptitle(title)
    figure.legend(handles.values(), handles.keys(), loc="center right", fontsize=9)
    figure.tight_layout(rect=(0, 0, 0.82, 0.98))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(
    axis: Any,
    points: Sequence[Point],
    phase: str,
    style: dict[str, dict[str, Any]],
    handles: dict[str, Any],
) -> None:
    copies = sorted((p.message_nbytes, p.gbps) for p in points if p.phase == "copy")
    (roof,) = axis.plot(*zip(*copies, strict=True), color="black", linewidth=2.5)
    handles.setdefault("device copy (the roof)", roof)
    for subject, look in style.items():
        found = sorted(
            (p.message_nbytes, p.gbps) for p in points if (p.subject, p.phase) == (subject, phase)
        )
        if found:
            (line,) = axis.plot(*zip(*found, strict=True), **look)
            handles.setdefault(subject, line)
    sizes = [size for size, _ in copies]
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xticks(sizes, [size_name(size) for size in sizes], rotation=60)
    axis.grid(alpha=0.3)
