"""A comparison as text."""

from __future__ import annotations

from collections.abc import Sequence

from gpt.runs import Comparison, Run


def table(runs: Sequence[Run], comparisons: Sequence[Comparison], last: int) -> str:
    """Losses and speeds of all runs, then the bytes of those that have a ledger."""
    head = ["run", "seeds", f"loss (last {last})", "gap %", "valid loss", "gap %", "k tokens/s"]
    rows = [
        [
            run.label,
            str(len(run.files)),
            f"{comparison.final_loss:.4f}",
            "" if run is runs[0] else _gap(comparison.gap, comparison.gap_interval),
            _optional(comparison.valid_loss, ".4f"),
            "" if run is runs[0] else _optional(comparison.valid_gap, "+.2f"),
            f"{run.speed() / 1e3:.2f}",
        ]
        for run, comparison in zip(runs, comparisons, strict=True)
    ]
    parts = [_aligned([head, *rows])]
    moved = [row for run in runs for row in _bytes(run)]
    if moved:
        head = ["run", "dimension", "codec", "native MB", "sent MB", "ratio", "error", "codec s"]
        parts.append(_aligned([head, *moved]))
    without = [run.label for run in runs[1:] if not run.ledgers]
    if without:
        parts.append(f"no ledger beside the log of: {', '.join(without)}")
    return "\n\n".join(parts)


def _bytes(run: Run) -> list[list[str]]:
    return [
        [
            run.label,
            dimension if len(ways) == 1 else f"{dimension} {way}",
            row["codec"],
            f"{row['raw_MB']:.1f}",
            f"{row['wire_MB']:.1f}",
            _optional(row["ratio"], ".2f"),
            _optional(row.get("error"), ".1e"),
            _optional(None if row.get("codec_ms") is None else row["codec_ms"] / 1e3, ".1f"),
        ]
        for dimension, ways in run.ledger_rows().items()
        for way, row in ways.items()
    ]


def _gap(mean: float, interval: float | None) -> str:
    return f"{mean:+.2f}" if interval is None else f"{mean:+.2f} ± {interval:.2f}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, numbers to the right, a rule below the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [all(not _number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _number(text: str) -> bool:
    return text[:1] in "+-0123456789" and text != ""
