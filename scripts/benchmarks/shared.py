"""Parser, progress lines and tables that the benchmarks share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

#: exit status of a call whose time was up before its work was done (EX_TEMPFAIL of sysexits.h)
TIME_IS_UP = 75


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a script's docstring as it is."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_data(parser: argparse.ArgumentParser, data: Path) -> None:
    """End with a usage error unless ``data`` is the prefix of a dataset."""
    if not data.with_name(f"{data.name}_train.idx").is_file():
        parser.error(f"--data: no dataset {data}; prepare_data.py writes one")


def say(text: str) -> None:
    """Print a progress line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]
