#!/usr/bin/env python3
"""Hold compressed runs against a baseline: a table, and a picture of the curves.

compare_losses.py baseline=runs/base/loss.jsonl recommended=runs/rec/loss.jsonl --png curves.png

The first run is the baseline. LABEL= is optional; several seeds of a run are given as a glob or
with commas and paired with the baseline's runs of the same seed. Bytes come from the ledger, a file
ledger.jsonl beside each log (--ledger names another).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpt.runs import Comparison, Run, RunError, compare, read_run
from gpt.table import table


def split_label(text: str) -> tuple[str, str]:
    """``LABEL=FILES`` or ``FILES``, whose label is then the folder's or the file's name."""
    label, equals, files = text.partition("=")
    if equals:
        return label, files
    path = Path(text)
    return (path.parent.name if path.stem == "loss" else path.stem) or text, text


def read_all(texts: Sequence[str], ledger: str) -> list[Run]:
    """The runs of the command line, baseline first. Raises RunError."""
    runs = [read_run(*split_label(text), ledger) for text in texts]
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise RunError(f"{label}: two runs have this label; write LABEL=FILE")
    return runs


def report(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> str:
    """The same figures as JSON, for other programs."""
    rows = [
        {
            **asdict(comparison),
            "seeds": run.seeds,
            "steps": int(run.steps[-1]),
            "tokens_per_second": run.speed(),
            "ledger": run.ledger_rows(),
        }
        for run, comparison in zip(runs, comparisons, strict=True)
    ]
    return json.dumps(rows, indent=1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("baseline", metavar="[LABEL=]FILES")
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]FILES")
    parser.add_argument("--last", type=int, default=20, help="steps that the final loss averages")
    parser.add_argument("--ledger", default="ledger.jsonl", help="name of the ledger's file")
    parser.add_argument("--need-ledger", action="store_true", help="fail where it is absent")
    parser.add_argument("--smooth", type=int, default=0, help="steps of the drawn running mean")
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    found = parser.parse_args(arguments)
    if found.last < 1 or found.smooth < 0:
        parser.error("--last: expected at least 1; --smooth: expected at least 0")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    try:
        runs = read_all([options.baseline, *options.runs], options.ledger)
        missing = [run.label for run in runs[1:] if not run.ledgers]
        if options.need_ledger and missing:
            raise RunError(
                f"{', '.join(missing)}: found no {options.ledger} beside the log; set "
                '"compression": {"ledger": {"jsonl": FILE}} in the DeepSpeed file'
            )
        comparisons = [compare(runs[0], run, options.last) for run in runs]
        print(table(runs, comparisons, options.last))
        if options.json:
            options.json.write_text(report(runs, comparisons) + "\n")
        if options.png:
            from gpt.plot import draw

            draw(runs, comparisons, options.png, options.smooth, options.title)
            print(f"picture: {options.png}")
    except RunError as error:
        print(f"compare_losses: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
