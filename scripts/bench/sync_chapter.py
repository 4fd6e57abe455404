"""The chapter of docs/results about islands: what loss_study.py and bench_sites.py left."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import loss_study
from bench.continued_islands import CONTINUED, continued
from bench.loss_chapters import ISLANDS, Missing, Study, command_section, untimed
from bench.loss_layouts import LAYOUTS
from bench.sites_bench import curves
from hybridcomp.compare import Wishes, compared
from hybridcomp.compare.draw import draw
from hybridcomp.compare.json_lines import read_lines
from hybridcomp.compare.reading import read_runs
from hybridcomp.compare.report import markdown_rows, mean_gap
from hybridcomp.compare.runs import Run

LAYOUT, SITES = "dp2", "sites"
FORMS = ("fp32", "8 bits", "4 bits", "2 bits", "sparse")
#: names of torchft's islands: steps between meetings
PEER = re.compile(r"peer torchft-fp8-(\d+)")
#: points of a final loss
LAST = 20
Values = NDArray[np.float64]

HEAD = """\
Islands that meet every H steps ([sync](../sync.md)) on the example GPT (`scripts/train_gpt.py`,
fp32, two CPU ranks), each rank an island: AdamW inside, outside Nesterov SGD at 0.7 and 0.9
(`diloco`) with messages in fp32 or by `blockint` with error feedback, and `sparseloco`. Every run
of a seed has the weights and the data of the native run of that seed (ZeRO 1). The final loss is
the mean of the last 20 steps; gaps are in percent, paired by seed, with the 95% interval of their
mean (Student's t). An island of one rank makes its steps with half of the batch that a step of
the native run has: at the same tokens islands make the same number of steps, each on its own
half, and clip the gradient of that half.
"""
PEERS = """\
"peer torchft-fp8-H" is DiLoCo with torchft's 8-bit all-reduce, written from its source
(`scripts/bench/peers/torchft_fp8.py`).
"""


@dataclass(frozen=True)
class SyncStudy:
    """The finished runs of the study, each with the seeds that it has."""

    study: Study

    @classmethod
    def of(cls, folder: Path) -> SyncStudy:
        """Return the runs of seeds that the native run has, too. Raises Missing without any."""
        found = Study.of(folder)
        native = found.done.get(loss_study.BASELINE, {})
        done = {loss_study.BASELINE: native}
        for name, runs in found.done.items():
            paired = {seed: runs[seed] for seed in runs if seed in native}
            if paired:
                done[name] = paired
        if not any(map(ISLANDS.fullmatch, done)):
            raise Missing(f"{folder}: in no seed a native run and islands are finished")
        study = replace(found, done=done)
        for name in done:
            study.check(name)
        return cls(study)

    def seeds(self, *names: str) -> list[int]:
        """Return the seeds that all of these runs have."""
        first, *others = (set(self.study.done[name]) for name in names)
        return sorted(first.intersection(*others))

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Return what was logged, by name, the native run first."""
        names = sorted(self.study.done, key=lambda name: (name != loss_study.BASELINE, name))
        words = [f"{name}={self.study.paths(name, self.seeds(name))}" for name in names]
        return {run.label: run for run in read_runs(words, Wishes().ledger)}

    def finals(self, name: str, seeds: Sequence[int] | None = None) -> Values:
        """Return the final loss of each seed; ``seeds``: of these."""
        trainings = zip(self.seeds(name), self.runs[name].trainings, strict=True)
        found = {seed: float(np.mean(one.losses[-LAST:])) for seed, one in trainings}
        return np.array([found[seed] for seed in seeds or found])

    def gap(self, name: str, base: str = loss_study.BASELINE) -> str:
        """Return by how many percent ``name`` ends above ``base``, paired by seed."""
        seeds = self.seeds(name, base)
        gaps = 100 * (self.finals(name, seeds) / self.finals(base, seeds) - 1)
        return mean_gap(gaps)

    def steps(self) -> int:
        """Return the steps of a run."""
        return int(self.runs[loss_study.BASELINE].trainings[0].steps[-1])

    def every(self, name: str) -> int:
        """Return the steps between two exchanges of ``name``."""
        found = ISLANDS.fullmatch(name) or PEER.fullmatch(name)
        return int(found[1]) if found else 1

    def intervals(self) -> list[int]:
        """Return the numbers of steps between meetings that were trained."""
        return sorted({int(found[1]) for name in self.runs if (found := ISLANDS.fullmatch(name))})

    def others(self) -> list[str]:
        """Return the runs that are no islands of ours, without the native one."""
        return [n for n in self.runs if not ISLANDS.fullmatch(n) and n != loss_study.BASELINE]

    def sent(self, name: str, kind: str = "wire_MB") -> float:
        """Return MB of all ranks over the run, a mean over the seeds."""
        rows = self.runs[name].ledger().values()
        return float(sum(way[kind] for ways in rows for way in ways.values()))

    def drift(self, name: str) -> float | None:
        """Return how far islands were apart at a meeting, in percent of the weights; a mean."""
        found = []
        for one in self.runs[name].trainings:
            lines = read_lines(one.source.with_name("ledger.jsonl"))
            found += [line["sync"]["drift"] for line in lines if line.get("sync") is not None]
        return 100 * float(np.mean(found)) if found else None


def sync_chapter(source: Path, out: Path) -> str:
    """Write the chapter from ``dp2``, ``dp2z0`` and ``sites`` in ``source``. Raises Missing."""
    found = SyncStudy.of(source / LAYOUT)
    picture(found, out / "sync.png")
    peers = [PEERS] if any(map(PEER.fullmatch, found.runs)) else []
    parts = [HEAD, *peers, *losses(found), *traffic(found)]
    figures: dict[str, Any] = {"losses": figures_of(found)}
    parts += continued(source / CONTINUED)
    links = curves.links(source / SITES)
    if links:
        parts += [SITES_HEAD, *curves.tables(links)]
        figures["sites"] = {
            rate: {name: {"loss": run.best[::10].round(4).tolist(),  # of every tenth step
                          "ends": run.ends[run.window - 1 :: 10].round(3).tolist()}
                   for name, run in runs.items()}
            for rate, runs in links.items()
        }  # fmt: skip
    else:
        parts.append("\nNot measured yet: the time to an equal loss over links.")
    others = {name: found.study.block(name) for name in found.others()}
    blocks = {name: block for name, block in others.items() if block is not None}
    (out / "sync_blocks.json").write_text(json.dumps(blocks, indent=1) + "\n", encoding="utf-8")
    (out / "sync.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return "\n".join([*parts, *commands(found)])


SITES_HEAD = """
## The time to an equal loss

Two sites of two ranks (network namespaces of one machine), ZeRO 0, at a constant learning rate
after the warm-up; each link in turn shapes what leaves a site. MB are those that left one site. The
loss is the mean of 30 steps; times as fast is against 4 bits every step. Waits are those of the
ledger (`meet_wait_ms`) of the first rank; where links are fast they are those of ranks for each
other."""


TRAFFIC = """
## Bytes

Bits a parameter a meeting are all that a rank sends in one, over the parameters; of runs that send
every step, in a step. SparseLoCo's own format has 0.219 (2 bits and 12 of a place for 1 value of
64). Drift is how far what islands send is apart, over the norm of the weights, a mean over all
meetings.
"""


def losses(found: SyncStudy) -> list[str]:
    """Return the tables of final losses, against native and against fp32 at the same H."""
    head = ["run", *FORMS]
    table, bits = [head], [["run", *FORMS[1:]]]
    for every in found.intervals():
        names = [f"H{every} {form}" for form in FORMS if f"H{every} {form}" in found.runs]
        seeds = max(len(found.seeds(name)) for name in names)
        row = [f"H = {every}, {seeds} seed{'s' * (seeds > 1)}"]
        against = [row[0]]
        for form in FORMS:
            name = f"H{every} {form}"
            there = name in found.runs
            row.append(f"{found.finals(name).mean():.4f} ({found.gap(name)})" if there else "-")
            if form != "fp32":
                base = f"H{every} fp32"
                against.append(found.gap(name, base) if there and base in found.runs else "-")
        table.append(row)
        bits.append(against)
    native = [loss_study.BASELINE, *found.others()]
    beside = [
        [
            "native" if name == loss_study.BASELINE else name,
            str(len(found.seeds(name))),
            f"{found.finals(name).mean():.4f}",
            "" if name == loss_study.BASELINE else found.gap(name),
        ]
        for name in native
    ]
    return [
        f"\n## Losses\n\n{found.steps()} steps; the loss, and in brackets the gap to native in "
        "percent, on the seeds that both have:\n",
        "![loss curves](sync.png)\n",
        *markdown_rows(table),
        "\nBeside them:\n",
        *markdown_rows([["run", "seeds", "loss", "gap to native %"], *beside]),
        "\nWhat fewer bits cost: the gap to fp32 messages at the same H, in percent:\n",
        *markdown_rows(bits),
    ]


def traffic(found: SyncStudy) -> list[str]:
    """Return the table of bytes and drift."""
    rows = [["run", "kB a step and rank", "bits a parameter a meeting", "drift %"]]
    meetings = [name for name in found.runs if ISLANDS.fullmatch(name) or PEER.fullmatch(name)]
    for name in [*meetings, *(n for n in found.others() if n not in meetings)]:
        ranks, steps = LAYOUTS[LAYOUT].ranks, found.steps()
        kilobytes = 1e3 * found.sent(name) / ranks / steps
        drift = found.drift(name)
        rows.append([
            name, f"{kilobytes:.2f}", f"{bits_of(found, name):.3f}",
            "-" if drift is None else f"{drift:.2f}",
        ])  # fmt: skip
    return [
        TRAFFIC,
        *markdown_rows(rows),
    ]


def bits_of(found: SyncStudy, name: str) -> float:
    """Return the bits that a rank sends for each parameter in one meeting, or step."""
    exact = next(n for n in found.runs if (m := ISLANDS.fullmatch(n)) and m[2] == "fp32")
    held = found.sent(exact, "raw_MB") / (found.steps() // found.every(exact))
    exchanges = found.steps() // found.every(name)
    return 32 * found.sent(name) / exchanges / held


def picture(found: SyncStudy, path: Path) -> None:
    """Draw native, every step, 4 bits by H, and H = 30, of the seeds that most of them have."""
    drawn = [loss_study.BASELINE, *found.others()[:2]]
    drawn += [f"H{every} 4 bits" for every in found.intervals()] + ["H30 fp32", "H30 sparse"]
    there = [name for name in dict.fromkeys(drawn) if name in found.runs]
    of_seed = {
        seed: [name for name in there if seed in found.seeds(name)]
        for seed in found.seeds(loss_study.BASELINE)
    }
    names = max(of_seed.values(), key=len)
    seeds = [seed for seed, runs in of_seed.items() if runs == names]
    words = [f"{name}={found.study.paths(name, seeds)}" for name in names]
    title = f"Islands, ZeRO 1 on two ranks, seeds {', '.join(map(str, seeds))}"
    draw(untimed(compared(words, Wishes())), path, 0, title)


def figures_of(found: SyncStudy) -> dict[str, Any]:
    """Return final losses by seed, MB and drift of each run, for other programs."""
    return {
        name: {
            "seeds": found.seeds(name), "final_losses": found.finals(name).tolist(),
            "sent_MB": found.sent(name),
            "drift_percent": found.drift(name) if run.ledger() else None,
        }
        for name, run in found.runs.items()
    }  # fmt: skip


def commands(found: SyncStudy) -> list[str]:
    """Return the commands that make the chapter again."""
    study = found.study
    divisor, rate = study.scale(LAYOUT)
    peers = [n.removeprefix("peer ") for n in found.others() if n.startswith("peer ")]
    words = [
        "--layouts", LAYOUT, "--presets", "--islands", *found.intervals(),
        "--steps", found.steps(), "--seeds", *study.seeds, "--divide-batch", divisor,
        "--lr", f"{rate:g}", "--blocks", "docs/results/sync_blocks.json",
        *(["--peers", *peers] if peers else []),
    ]  # fmt: skip
    return command_section(
        words,
        "scripts/bench/bench_sites.py    # as root",
        "scripts/bench/results.py --sync runs/loss_study",
    )
