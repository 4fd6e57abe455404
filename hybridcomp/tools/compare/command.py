"""Run ``hybridcomp compare``: parse the command line, train, compare, draw and write."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridcomp.errors import install_hint
from hybridcomp.escaping import one_line
from hybridcomp.tools import pages
from hybridcomp.tools.compare import chart, report
from hybridcomp.tools.compare.reading import check_comparable, read_runs
from hybridcomp.tools.compare.report import Result
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.compare.statistics import align, caveats, compare

DESCRIPTION = """\
Hold compressed runs against a baseline: a table, a page with charts (report.html), a report in
Markdown with a picture, and a chart in W&B.

  hybridcomp compare baseline=runs/base recommended=runs/rec

The first run is the baseline. A run is a log (loss.jsonl), a W&B offline run folder, an output
folder of Hugging Face's Trainer (trainer_state.json), or a folder that holds one of these or one
for each seed; a glob or commas name several seeds, which are paired with the baseline's. LABEL= is
optional. Runs with another model, data order or seed are refused.

  hybridcomp compare --launch --candidate recommended --candidate mine=block.json --seeds 0 1 2 \\
      -- deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json --seed {seed}

trains first: the command as it is, and with each block in the place of its DeepSpeed file's.
{seed}, {folder} (of the run) and {port} (a free one) are filled in. Losses come from the engine, or
from the script's own log where the command says --log {folder}/loss.jsonl. What has finished is not
trained again.
"""


#: the page with charts
PAGE = "report.html"


def no_picture() -> str:
    """Return the message that a picture needs matplotlib."""
    return f"no picture: it needs matplotlib: {install_hint('plot')}"


@dataclass(frozen=True)
class Wishes:
    """Options of a comparison."""

    out: Path = Path("runs/comparison")
    last: int = 20  # points averaged into the final loss
    smooth: int = 0  # points of the drawn running mean; 0: 1/20 of the run
    title: str = "Training loss with and without compressed communication"
    ledger: str = "ledger.jsonl"
    need_ledger: bool = False
    wandb: str | None = None  # W&B project; "none": no chart; None: the runs' own, or "hybridcomp"
    group: str | None = None
    command: Sequence[str] = field(default_factory=tuple)  # the command line, for the report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add = parser.add_argument
    add("runs", nargs="*", metavar="[LABEL=]RUN", help="baseline first")
    add("--out", type=Path, default=Wishes.out, metavar="FOLDER",
        help="of report, picture, figures and W&B's folder (runs/comparison)")  # fmt: skip
    add("--last", type=int, default=Wishes.last, metavar="N",
        help="points that the final loss averages (20)")  # fmt: skip
    add("--smooth", type=int, default=0, metavar="N", help="points of the drawn running mean")
    add("--title", default=Wishes.title, help="of picture and report")
    add("--ledger", default=Wishes.ledger, metavar="NAME",
        help="of the ledger's file beside each log (ledger.jsonl)")  # fmt: skip
    add("--need-ledger", action="store_true", help="fail where it is absent")
    add("--wandb", metavar="PROJECT", help="for the chart; none: no chart (offline by default)")
    add("--wandb-group", metavar="GROUP", help="for the chart (that of the runs)")
    add("--open", action="store_true", help="show report.html in the browser")
    add("--launch", action="store_true", help="train first; a command follows after --")
    add("--candidate", action="append", default=[], metavar="[NAME=]BLOCK",
        help="with --launch: a preset, a JSON file, or JSON")  # fmt: skip
    add("--seeds", type=int, nargs="+", help="with --launch (0)")


def run(options: argparse.Namespace) -> int:
    """Compare, print the table and the paths of all files. Raises CompareError, OSError."""
    wishes = wishes_of(options)
    if options.launch:
        options.runs = train(options, wishes)
    elif options.candidate or options.seeds:
        name = "--candidate" if options.candidate else "--seeds"
        raise CompareError(f"{name}: found no --launch; name finished runs, or add --launch")
    if len(options.runs) < 2:
        raise CompareError(f"found {len(options.runs)} runs; give a baseline and at least one run")
    compare_runs(options.runs, wishes)
    page = wishes.out / PAGE
    if options.open and page.is_file() and not webbrowser.open(page.resolve().as_uri()):
        print(f"--open: found no browser here; open {page} in one", file=sys.stderr)
    return 0


def train(options: argparse.Namespace, wishes: Wishes) -> list[str]:
    """Train the runs of ``--launch``; return them as words. Raises CompareError, ConfigError."""
    from hybridcomp.tools.compare import launch

    if not options.runs or not options.candidate:
        raise CompareError(
            "--launch: expected at least one --candidate, then -- and a command; see --help"
        )
    check_first(wishes)
    if find_spec("matplotlib") is None:
        print(no_picture(), file=sys.stderr)
    if lacking := pages.missing():
        print(f"no {PAGE}: {lacking}", file=sys.stderr)
    blocks = dict(launch.block_of(text) for text in options.candidate)
    project = None if wishes.wandb in (None, "none") else wishes.wandb
    group = wishes.group or wishes.out.name
    return launch.train(
        launch.RunPlan(
            options.runs, {launch.BASELINE: None, **blocks}, options.seeds or [0], wishes.out,
            project, group,
        )
    )  # fmt: skip


def wishes_of(options: argparse.Namespace) -> Wishes:
    """Read the options of the command line. Raises CompareError."""
    if options.last < 1 or options.smooth < 0:
        raise CompareError("--last: expected at least 1; --smooth: expected at least 0")
    return Wishes(
        options.out, options.last, options.smooth, options.title, options.ledger,
        options.need_ledger, options.wandb, options.wandb_group,
        ["hybridcomp", "compare", *sys.argv[2:]],
    )  # fmt: skip


def check_first(wishes: Wishes) -> None:
    """Check that report and chart can be written, before anything is trained or printed.

    Makes ``wishes.out``. Raises CompareError where the folder cannot be written, or W&B is wanted
    and not installed.
    """
    try:
        wishes.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wishes.out):
            pass
    except OSError as error:
        todo = "expected a folder that can be written; name another one"
        raise CompareError(f"--out {wishes.out}: {error.strerror or error}; {todo}") from None
    if wishes.wandb not in (None, "none") and find_spec("wandb") is None:
        raise CompareError(f"the W&B chart needs W&B: {install_hint('wandb')}")


def compare_runs(texts: Sequence[str], wishes: Wishes) -> Result:
    """Read the runs ``texts``, print, write under ``wishes.out``. Raises CompareError.

    A picture or chart that fails does not keep the report from being written.
    """
    result = compared(texts, wishes)
    check_first(wishes)
    print(report.table(result))
    picture = _picture(result, wishes)
    (wishes.out / "comparison.json").write_text(report.as_json(result) + "\n", encoding="utf-8")
    name = None if picture is None else picture.name
    text = report.markdown(result, wishes.title, name, shlex.join(wishes.command))
    (wishes.out / "report.md").write_text(text, encoding="utf-8", errors="backslashreplace")
    made = [PAGE] if _page(result, wishes) else []
    written = [*made, "report.md", *([name] if name else []), "comparison.json"]
    print(f"\nwritten: {wishes.out}/{', '.join(written)}")
    _chart(result, wishes, picture)
    return result


def _page(result: Result, wishes: Wishes) -> bool:
    """Write the page; if a package is missing, print that and return False."""
    (wishes.out / PAGE).unlink(missing_ok=True)  # remove the page of an earlier comparison
    if lacking := pages.missing():
        print(f"no {PAGE}: {lacking}", file=sys.stderr)
        return False
    from hybridcomp.tools.compare import page

    try:
        text = page.page(result, wishes.title, wishes.smooth, shlex.join(wishes.command))
    except Exception as error:  # a package may be damaged or of another version
        print(f"no {PAGE}: {one_line(f'{type(error).__name__}: {error}')}", file=sys.stderr)
        return False
    (wishes.out / PAGE).write_text(text, encoding="utf-8", errors="backslashreplace")
    return True


def _picture(result: Result, wishes: Wishes) -> Path | None:
    """Draw the picture; if matplotlib is missing or fails, print that and return None."""
    if find_spec("matplotlib") is None:
        print(no_picture(), file=sys.stderr)
        return None
    from hybridcomp.tools.compare.draw import draw

    picture = wishes.out / "losses.png"
    try:
        draw(result, picture, wishes.smooth, wishes.title)
    except Exception as error:  # fonts, caches and back ends each fail in their own way
        print(f"no picture: {one_line(f'{type(error).__name__}: {error}')}", file=sys.stderr)
        return None
    return picture


def compared(texts: Sequence[str], wishes: Wishes) -> Result:
    """Read and compare the runs; write nothing. Raises CompareError."""
    runs = read_runs(texts, wishes.ledger)
    missing = [found.label for found in runs[1:] if not found.ledger()]
    if wishes.need_ledger and missing:
        raise CompareError(
            f"{', '.join(missing)}: found no {wishes.ledger} beside the log; set "
            '"compression": {"ledger": {"jsonl": FILE}} in the DeepSpeed file'
        )
    notes = [note for found in runs[1:] for note in check_comparable(runs[0], found)]
    aligned = align(runs, wishes.last)
    if missing:
        notes.append(f"no figures of bytes in the logs of: {', '.join(missing)}")
    notes += [
        f"{found.label}: its DeepSpeed settings hold a block, and nothing shows that it acted; was "
        "the job started with `deepspeed --module hybridcomp.run` or `torchrun -m hybridcomp.run`?"
        for found in runs
        if not found.ledger() and any(has_block(t.settings) for t in found.trainings)
    ]
    comparisons = compare(runs, aligned, wishes.last)
    notes += caveats(runs, aligned, comparisons, wishes.last)
    return Result(runs, aligned, comparisons, wishes.last, [*aligned.notes, *notes])


def has_block(settings: Mapping[str, Any] | None) -> bool:
    """Return whether DeepSpeed settings have an enabled ``compression`` block."""
    block = (settings or {}).get("compression")
    return isinstance(block, Mapping) and block.get("enabled", True) is True


def _chart(result: Result, wishes: Wishes, picture: Path | None) -> None:
    if wishes.wandb == "none":
        return
    if wishes.wandb is None and find_spec("wandb") is None:
        print(f"no W&B chart: {install_hint('wandb')}")
        return
    trainings = [training for found in result.runs for training in found.trainings]
    project = wishes.wandb or next((t.project for t in trainings if t.project), "hybridcomp")
    group = wishes.group or next((t.group for t in trainings if t.group), "")
    try:
        place = chart.log(result, wishes.out, project, group, wishes.title, picture)
    # the server, the key or the disk may fail; the report is written without the chart
    except Exception as error:
        print(f"no W&B chart: {one_line(f'{type(error).__name__}: {error}')}", file=sys.stderr)
        return
    print(f"W&B: {place}")
