"""Write the results as Markdown: shares of a copy, and the cost of small messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu_bench.measure import LONG_NBYTES, Point
from benchmarks.gpu_bench.targets import below, target_of
from benchmarks.shared import table

ABOUT_SHARES = (
    "Shares are of a device copy (`Tensor.copy_`) of as many bytes, read and written, in the same "
    "run, with cold caches, median. *Italic*: below its target. A dash: not measured. `sum_encode` "
    "decodes the payloads of 7 ranks, adds the own values and encodes the sum, in one launch."
)
ABOUT_SMALL = (
    "The host's: to submit the work, Python included, nothing waited for. `all_reduce`: the three "
    "launches; `path`: the collective as channels call it, in a group of 8 that moves nothing; "
    "`graph`: a replayed CUDA graph of the launches."
)

Cell = Callable[[Point], str]


def document(points: Sequence[Point], facts: dict[str, Any]) -> str:
    """Return the page of a run."""
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    lines = ["# Codecs on a GPU", "", f"{facts['device']}, {versions}.", "", ABOUT_SHARES]
    for size in sorted({p.message_nbytes for p in points}, reverse=True):
        lines += ["", *section([p for p in points if p.message_nbytes == size])]
    lines += ["", "## Targets", ""]
    missed = facts["missed"]
    lines += [f"* missed: {line}" for line in missed] or ["All were met."]
    lines += [f"* left out: {name}: {why}" for name, why in facts["left_out"].items()]
    return "\n".join(lines) + "\n"


def size_name(nbytes: int) -> str:
    """Format a size: 64 KB, 256 MB, 1 GB."""
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def section(points: Sequence[Point]) -> list[str]:
    """Return the section of messages of one size."""
    size = points[0].message_nbytes
    short = size < LONG_NBYTES
    title = f"## {size_name(size)}: share of a copy"
    lines = [title + ", microseconds of the device / of the host" * short, ""]
    lines += [ABOUT_SMALL, ""] if short else []
    return [*lines, *_table(points, (_share, _small)[short])]


def _share(point: Point) -> str:
    text = f"{point.share:.2f}"
    return f"*{text}*" if below(point) else text


def _small(point: Point) -> str:
    return f"{_share(point)}, {point.seconds * 1e6:.1f} / {point.host_us:.1f}"


def _table(points: Sequence[Point], cell: Cell) -> list[str]:
    """Return a row for each subject and phase, a column for each dtype."""
    dtypes = list(dict.fromkeys(p.dtype for p in points))
    found = {(p.subject, p.phase, p.dtype): p for p in points}
    rows = []
    for subject, phase in dict.fromkeys((p.subject, p.phase) for p in points):
        row = [found.get((subject, phase, dtype)) for dtype in dtypes]
        wanted = dict.fromkeys(
            f"{share:.2f}" for p in row if p and (share := target_of(p)) is not None
        )
        rows.append([subject, phase, " / ".join(wanted), *(cell(p) if p else "-" for p in row)])
    return table(["", "", "target", *dtypes], rows)
