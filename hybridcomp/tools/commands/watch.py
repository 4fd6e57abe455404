"""Show a running job's ledger as a table that updates: ``hybridcomp watch ledger.jsonl``.

Reads only the file, so that the job loses no time, and job and command can be restarted
independently. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any, Literal

from hybridcomp.errors import ConfigError, HybridcompError, install_hint
from hybridcomp.escaping import one_line
from hybridcomp.tools import pages
from hybridcomp.tools.commands.ledger_reader import AGE_S, LedgerReader
from hybridcomp.tools.compare import report

#: seconds between two reads of the file
LOOK_S = 2.0
#: columns that are folded in a narrow terminal
WRAPPED = ("codec", "messages")

DESCRIPTION = """\
Show what a running job sends, from the file of "ledger": {"jsonl": FILE}, at each of its reports:

  hybridcomp watch ledger.jsonl                     in this terminal, until Ctrl-C
  hybridcomp watch ledger.jsonl --html watch.html   and as a page that a browser keeps current
  ssh HOST tail -F -n +1 run/ledger.jsonl | hybridcomp watch -

The command only reads the file. When the job is started again with the same file, the table begins
anew.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``watch`` to the commands of the command line."""
    parser = commands.add_parser(
        "watch", help="follow a running job's ledger in a table", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("file", type=Path, help="of the job's ledger.jsonl; -: standard input")
    add("--html", type=Path, metavar="PAGE", help="write this page at each report, too")
    add("--once", action="store_true", help="show what is there, and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the table until Ctrl-C; returns the exit status. Raises HybridcompError."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise HybridcompError(f"watch needs rich: {install_hint('report')}") from None
    if options.file.is_dir():
        raise ConfigError("FILE", str(options.file), "expected the file of a ledger; name it")
    if options.html is not None and (lacking := pages.missing("jinja2")):
        raise HybridcompError(f"--html: {lacking}")
    reader = LedgerReader(options.file)
    if options.once:
        from rich.console import Console

        reader.read(once=True)
        Console(soft_wrap=True).print(_shown(reader))
        _write(reader, options.html)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(reader, options.html)
    return 0


def _follow(reader: LedgerReader, page: Path | None) -> None:
    """Update the table at each report, and its age in between, until standard input ends."""
    from rich.console import Console
    from rich.live import Live

    console, shown = Console(), float("-inf")
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while not reader.has_ended:
            new, now = reader.read(), time.monotonic()
            if new or now - shown >= AGE_S:
                _write(reader, page)
                shown = now
                if live is not None:
                    live.update(_shown(reader), refresh=True)
                elif new:
                    console.print(_shown(reader))
            time.sleep(LOOK_S)


def _shown(reader: LedgerReader) -> Any:
    """Return the table and the sentences below it, for rich."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = reader.table()
    table = Table(
        title=Text(f"hybridcomp watch {one_line(reader.path)}"), title_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name, right in zip(rows[0], report.numeric(rows), strict=True):
        justify: Literal["right", "left"] = "right" if right else "left"
        # a figure without its last digits would be another figure
        overflow: Literal["fold", "ellipsis"] = "fold" if name in WRAPPED else "ellipsis"
        table.add_column(name, justify=justify, no_wrap=name not in WRAPPED, overflow=overflow)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return Group(table, *map(Text, reader.told(time.time())))


def _write(reader: LedgerReader, page: Path | None) -> None:
    """Write the page completely or not at all, so that no browser loads half of it."""
    if page is None:
        return
    rows = reader.table()
    text = pages.render(
        "watch.html.jinja", title=f"hybridcomp watch {one_line(reader.path)}", rows=rows,
        right=report.numeric(rows), lines=reader.told(time.time()), every=AGE_S,
        at=time.strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip
    beside = page.with_name(f".{page.name}.new")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(page)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
