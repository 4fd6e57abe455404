"""Format a comparison as text, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hybridcomp import escaping
from hybridcomp.tools.compare.runs import Curve, Run, short
from hybridcomp.tools.compare.statistics import LEAST, Aligned, Comparison, half_width

#: sentence about the gaps of several seeds
INTERVAL, RANGE = ", with the 95% interval of their mean", ", with the range over the two seeds"


@dataclass(frozen=True)
class Result:
    """A comparison: its runs, common axis, statistics and notes."""

    runs: Sequence[Run]
    aligned: Aligned
    comparisons: Sequence[Comparison]
    last: int  # points averaged into the final loss
    notes: Sequence[str]


def table(result: Result) -> str:
    """Format losses and speeds, bytes, and notes for a terminal."""
    parts = [aligned(losses(result))]
    moved = bytes_of(result.runs)
    if len(moved) > 1:
        parts.append(aligned(moved))
    parts += [f"note: {escaping.one_line(note, escaping.SENTENCE)}" for note in result.notes]
    return "\n\n".join(parts)


def markdown(result: Result, title: str, picture: str | None, command: str) -> str:
    """Format the report in Markdown."""
    lines = [
        f"# {escaping.markdown(title)}",
        "",
        escaping.markdown(about(result)),
        "",
        *markdown_rows(losses(result)),
    ]
    if picture:
        lines += ["", f"![loss curves]({picture})"]
    moved = bytes_of(result.runs)
    if len(moved) > 1:
        lines += [
            "",
            "Bytes of all ranks over the whole run of one seed:",
            "",
            *markdown_rows(moved),
        ]
    if result.notes:
        lines += ["", *(f"* {escaping.markdown(note)}" for note in result.notes)]
    lines += ["", *escaping.fenced(command)]
    return "\n".join(lines) + "\n"


def about(result: Result) -> str:
    """Return where losses are taken, over which seeds, and what a gap is."""
    seeds = [str(seed) for seed in result.runs[0].seeds if seed is not None]
    end = f"{result.aligned.axis[-1]:,.0f} {result.aligned.unit}"
    count = len(result.runs[0].trainings)
    spread = INTERVAL if count >= LEAST else RANGE if count > 1 else ""
    those = f", seeds {', '.join(seeds)}" if seeds else ""
    return (
        f"Loss after {end}{those}; the final loss is the mean of the last {result.last} points. "
        f"Gaps are to {escaping.one_line(result.runs[0].label)}, paired by seed{spread}. "
        '"Gap, same time" compares the losses when the faster of the two runs has finished, "gap, '
        'same bytes" after as many bytes as the run with fewer sends in all.'
    )


def as_json(result: Result) -> str:
    """Format the figures of the report as JSON, for other programs."""
    rows = [
        {
            **asdict(comparison),
            "seeds": run.seeds,
            "end": float(result.aligned.axis[-1]),
            "unit": result.aligned.unit,
            "points": len(result.aligned.axis),
            "steps": int(run.trainings[0].steps[-1]),
            "tokens_per_second": run.speed(),
            "ledger": run.ledger(),
        }
        for run, comparison in zip(result.runs, result.comparisons, strict=True)
    ]
    found = {"runs": rows, "last": result.last, "notes": list(result.notes)}
    return escaping.strict_json(found, indent=1)


def losses(result: Result) -> list[list[str]]:
    """Return head and one row for each run, without columns that no run has."""
    head = [
        "run", "seeds", f"loss (last {result.last})", "gap %", "gap %, same time",
        "gap %, same bytes", "valid loss", "valid gap %", "k tokens/s",
    ]  # fmt: skip
    rows = [head]
    for number, (run, found) in enumerate(zip(result.runs, result.comparisons, strict=True)):
        speed = run.speed()
        rows.append(
            [
                run.label,
                str(len(run.trainings)),
                f"{found.final_loss:.4f}",
                mean_gap(found.gaps) if number else "",
                mean_gap(found.clock_gaps) if number else "",
                mean_gap(found.byte_gaps) if number else "",
                _optional(found.valid_loss, ".4f"),
                _optional(found.valid_gap, "+.2f") if number else "",
                "-" if speed is None else f"{speed / 1e3:.2f}",
            ]
        )
    kept = [i for i in range(len(head)) if any(row[i] not in ("", "-") for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


def bytes_of(runs: Sequence[Run]) -> list[list[str]]:
    """Return head and one row for each run, dimension and direction."""
    rows = [["run", "dimension", "codec", "native MB", "sent MB", "ratio", "error", "codec s"]]
    for run in runs:
        for name, row in run.rows():
            codec_ms = row.get("codec_ms")
            rows.append(
                [
                    run.label,
                    name,
                    short(row["codec"]),
                    f"{row['raw_MB']:.1f}",
                    f"{row['wire_MB']:.1f}",
                    _optional(row["ratio"], ".2f"),
                    _optional(row.get("error"), ".1e"),
                    _optional(None if codec_ms is None else codec_ms / 1e3, ".1f"),
                ]
            )
    return rows


def mean_gap(gaps: Sequence[float] | Curve | None) -> str:
    """Format the mean of the seeds' gaps in percent: ``+0.07 ± 0.15``.

    Two seeds: their range, ``+0.07 (-0.02 to +0.16)``; one: the gap; none: ``-``.
    """
    if gaps is None or not len(gaps):
        return "-"
    values = np.asarray(gaps, dtype=np.float64)
    half = half_width(values)
    if half is not None:
        return f"{values.mean():+.2f} ± {half:.2f}"
    spread = f" ({values.min():+.2f} to {values.max():+.2f})" if len(values) > 1 else ""
    return f"{values.mean():+.2f}{spread}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table; the first row is its head. Marks in cells are escaped."""
    head, *body = (f"| {' | '.join(map(escaping.markdown, row))} |" for row in rows)
    return [head, f"|{'---|' * len(rows[0])}", *body]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align columns, text to the left and numbers to the right, with a rule below the head."""
    rows = [[escaping.one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, numeric(rows), strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def numeric(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return, for each column of a table with a head, whether it has numbers (right-aligned)."""
    return [any(_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]


def _number(text: str) -> bool:
    return text[:1] in "+-0123456789" and text != ""
