"""Page of islands that meet every H steps: losses by H and codec, and time to an equal loss."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import loss_study
from bench.bench_sites import HEADINGS, table
from bench.loss_chapters import Missing, Study, commands, untimed
from hybridcomp.compare import Wishes, compared
from hybridcomp.compare.draw import draw
from hybridcomp.compare.json_lines import read_lines
from hybridcomp.compare.report import markdown_rows, with_interval
from hybridcomp.compare.statistics import half_width

LAYOUT = "dp2"
#: name of a run of loss_study.py --islands
NAME = re.compile(r"H(\d+) (.+)")
EXACT = "fp32"
#: runs in the picture, where they are there
DRAWN = ("H10 4 bits", "H30 fp32", "H30 4 bits", "H30 sparse", "H100 4 bits", "every step 4 bits")

HEAD = """\
The example GPT (0.85 M parameters, fp32) on two CPU ranks, each an island with its own AdamW, that
meet every H optimizer steps ([sync](../sync.md)): outer Nesterov SGD with rate 0.7 and momentum 0.9
(`diloco`), by `blockint` with error feedback or in fp32, or `sparseloco`. Beside it *native*, which
is ZeRO 1 over both ranks, and the same with 4 bits for gradients in every step. Every run of a seed
has native's weights and order of data. The loss is that of text that no run trained on, after the
last step, the mean over the islands' own weights; gaps are in percent, paired by seed, with the 95%
interval of their mean (Student's t).
"""
TABLE = """\
## Losses by H and codec

{tokens:,.0f} tokens in {steps} steps, {seeds}; learning rate {rate:g} after the warm-up, falling
to 0.

![loss curves of islands](sync_{layout}.png)
"""
COLUMNS = """\
*to fp32*: against islands with the same H that meet in fp32. *bits*: of a weight in a meeting, of
an island. *MB a step*: what a rank sends, over all steps. *drift*: how far islands are apart before
the last meeting in the ledger, over the norm of the weights.
"""
SITES = """\
## Time to an equal loss over two sites

Two sites of two ranks in network namespaces, a link of the named rate between them in each
direction; {steps} steps of the same model in every run, one seed ({seed}), micro-batches of
{batch}. The loss to reach is the highest of the runs' last ones (means of {window} steps), so that
all reach it; *times as fast* is against 4 bits in every step, gradients and differences of
parameters. All four ranks share two cores, so a step takes longer than two sites would take, in
every run alike. *of it hidden*: of the wait for messages of the plain islands.
"""


def sync_chapter(source: Path, out: Path) -> str:
    """Write picture and ``sync.json``; return the page. Raises Missing without islands' runs."""
    study = Study.of(source / LAYOUT)
    names = [name for name in study.whole if NAME.fullmatch(name)]
    if not names or len(study.seeds) < 2:
        raise Missing(f"{source}: no islands with two seeds and a baseline are finished")
    rows = [row(study, name) for name in study.whole]
    drawn = [loss_study.BASELINE, *(name for name in DRAWN if name in study.whole)]
    result = untimed(
        compared([f"{name}={study.paths(name)}" for name in drawn], Wishes(need_ledger=True))
    )
    draw(result, out / f"sync_{LAYOUT}.png", 0, f"Islands of one rank, {study.say_seeds()}")
    settings = study.done[loss_study.BASELINE][study.seeds[0]]
    parts = [
        HEAD,
        TABLE.format(
            tokens=result.aligned.axis[-1],
            steps=len(result.aligned.axis),
            seeds=study.say_seeds(),
            rate=settings["optimizer"]["params"]["lr"],
            layout=LAYOUT,
        ),
        *losses_table(rows),
        "",
        COLUMNS,
        *left_out(study),
    ]
    sites = source / "sites" / "sites.json"
    figures: dict[str, Any] = {"losses": rows}
    if sites.is_file():
        figures["sites"] = json.loads(sites.read_text())
        parts += sites_part(figures["sites"])
    (out / "sync.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return "\n".join([*parts, *asked(study, "sites" in figures)])


def row(study: Study, name: str) -> dict[str, Any]:
    """Return the figures of one run: losses by seed, gaps in percent, bytes, drift."""
    found = NAME.fullmatch(name)
    losses = valid_losses(study, name)
    exact = f"H{found[1]} {EXACT}" if found else ""
    gaps = _gaps(losses, valid_losses(study, loss_study.BASELINE))
    figures: dict[str, Any] = {
        "run": name,
        "every": int(found[1]) if found else None,
        "valid_losses": losses,
        "gaps": gaps,
        "gaps_to_fp32": None,
    }
    if found and found[2] != EXACT and exact in study.whole:
        figures["gaps_to_fp32"] = _gaps(losses, valid_losses(study, exact))
    ledger = study.folder / name / f"seed{study.seeds[0]}" / "ledger.jsonl"
    if ledger.is_file():
        lines = read_lines(ledger)
        kinds = [k for one in lines[-1]["dimensions"].values() for k in one.values()]
        raw, wire = (sum(kind[key] for kind in kinds) for key in ("raw_MB", "wire_MB"))
        figures["bits"] = 32 * wire / raw if found else None
        ranks = loss_study.LAYOUTS[LAYOUT].ranks
        figures["MB_step"] = wire / lines[-1]["step"] / ranks
        drifts = [line["sync"]["drift"] for line in lines if "sync" in line]
        figures["drift"] = drifts[-1] if drifts else None
    return figures


def valid_losses(study: Study, name: str) -> list[float]:
    """Return the validation loss of each seed."""
    folders = [study.folder / name / f"seed{seed}" for seed in study.seeds]
    ends = [read_lines(folder / "loss.jsonl")[-1] for folder in folders]
    return [float(end["valid_loss"]) for end in ends]


def _gaps(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    return [100 * (mine / other - 1) for mine, other in zip(losses, others, strict=True)]


def losses_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table: native and every step first, then by H."""
    table_rows = [["run", "loss", "gap %", "to fp32 %", "bits", "MB a step", "drift"]]
    for found in sorted(rows, key=lambda one: one["every"] or 0):
        native = found["run"] == loss_study.BASELINE
        table_rows.append(
            [
                "native" if native else found["run"],
                f"{np.mean(found['valid_losses']):.4f}",
                "" if native else interval(found["gaps"]),
                interval(found["gaps_to_fp32"]),
                _form(found.get("bits"), "{:.3g}"),
                _form(found.get("MB_step"), "{:.3g}"),
                _form(found.get("drift"), "{:.2g}"),
            ]
        )
    return markdown_rows(table_rows)


def interval(gaps: Sequence[float] | None) -> str:
    """Return mean and interval of the gaps of all seeds; "" where there are none."""
    if gaps is None:
        return ""
    return with_interval(float(np.mean(gaps)), half_width(np.array(gaps)))


def _form(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def left_out(study: Study) -> list[str]:
    """Return a sentence with the runs that lack seeds."""
    short = [
        f"{name} ({len(seeds)})" for name, seeds in study.done.items() if name not in study.whole
    ]
    if not short:
        return []
    return [f"Left out, with fewer than {len(study.seeds)} seeds: {', '.join(short)}.\n"]


def sites_part(found: dict[str, Any]) -> list[str]:
    """Return the tables of bench_sites.py."""
    parts = [SITES.format(**found["settings"])]
    for rate, rows in found["rates"].items():
        parts += [f"### {_rate(rate)}\n", f"Equal loss {rows[0]['equal_loss']:.4f}:\n"]
        parts += [*table([{key: one.get(key) for key in HEADINGS} for one in rows]), ""]
    return parts


def _rate(text: str) -> str:
    return text.lower().replace("mbit", " Mb/s").replace("gbit", " Gb/s")


def asked(study: Study, sites: bool) -> list[str]:
    """Return the commands that make the page again."""
    lines = commands({LAYOUT: study}, "sync")
    every = sorted({int(found[1]) for name in study.whole if (found := NAME.fullmatch(name))})
    words = f"--islands {' '.join(map(str, every))}"
    lines = [line.replace("--blocks docs/results/sync_blocks.json", words) for line in lines]
    if sites:
        lines.insert(-2, "scripts/bench/bench_sites.py --out runs/loss_study/sites")
    return lines
