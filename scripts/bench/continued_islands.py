"""The section of docs/results/sync.md about islands that begin with a native checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import loss_study
from bench.loss_chapters import ISLANDS, Study
from hybridcomp.compare.json_lines import read_lines
from hybridcomp.compare.report import markdown_rows, mean_gap

#: layout of loss_study.py --after; percent that counts as equal
CONTINUED, NEAR = "dp2z0", 0.5
Values = NDArray[np.float64]


def continued(folder: Path) -> list[str]:
    """Return the section of islands that begin with a checkpoint of an ordinary run."""
    head = "\n## From a checkpoint\n"
    study = Study.of(folder)
    names = [name for name in study.done if ISLANDS.fullmatch(name)]
    if not study.seeds or not names:
        return [head, "Not measured yet."]
    until = f"meetings until within {NEAR} %"
    rows = [["run", "gap after 1 meeting %", "at the end %", "to fp32 %", until]]
    steps = 0
    for name in sorted(names, key=lambda name: (every_of(name), name)):
        seeds = sorted(set(study.done[name]) & set(study.seeds))
        gaps, steps = gaps_by_meeting(study, name, seeds)
        rows.append([
            name, f"{gaps[:, 0].mean():+.2f}", at_the_end(gaps),
            to_fp32(study, name, seeds), meetings_until(gaps.mean(axis=0)),
        ])  # fmt: skip
    return [
        head,
        f"Native goes on beside islands that begin with its checkpoint ({study.say_seeds()}, ZeRO "
        f"0, {steps} steps more, the learning rate falling to 0 over all). Losses are means over "
        "the H steps before a meeting, gaps those to native in the same steps, on the same data; "
        "to fp32 is the gap at the end to islands that send fp32. "
        f"An island is within {NEAR} % from the first meeting on after which all gaps are below "
        "that. A gap below 0 does not say that islands train better: outer momentum makes their "
        "steps longer, which helps where the learning rate is low for native.\n",
        *markdown_rows(rows),
        f"\n`{command(study, steps, {every_of(name) for name in names})}`",
    ]


def command(study: Study, steps: int, intervals: Iterable[int]) -> str:
    """Return the command that trains the runs of the section."""
    settings = study.done[loss_study.BASELINE][study.seeds[0]]
    after = settings["scheduler"]["params"]["total_num_steps"] - steps
    divisor, rate = study.scale(CONTINUED)
    words = ["--layouts", CONTINUED, "--after", after, "--steps", steps, "--presets",
             "--islands", *sorted(intervals), "--divide-batch", divisor,
             "--lr", f"{rate:g}"]  # fmt: skip
    return f"scripts/bench/loss_study.py {shlex.join(map(str, words))}"


def at_the_end(gaps: Values) -> str:
    """Format the mean over the seeds of the gaps after the last meeting, with its interval."""
    return mean_gap(gaps[:, -1])


def to_fp32(study: Study, name: str, seeds: Sequence[int]) -> str:
    """Format the gap at the end to islands of the same H that send fp32; ``-`` without them."""
    exact = f"H{every_of(name)} fp32"
    both = [seed for seed in seeds if seed in study.done.get(exact, {})]
    if name == exact or not both:
        return "-"
    return at_the_end(gaps_by_meeting(study, name, both, exact)[0])


def gaps_by_meeting(
    study: Study, name: str, seeds: Sequence[int], to: str = loss_study.BASELINE
) -> tuple[Values, int]:
    """Return gaps to the run ``to`` in percent, (seeds, meetings), and the steps of a run."""
    every, rows, steps = every_of(name), [], 0
    for seed in seeds:
        own, base = (losses_in(study.folder / n / f"seed{seed}") for n in (name, to))
        steps = min(len(own), len(base))
        count = steps // every
        means = [one[: count * every].reshape(count, every).mean(axis=1) for one in (own, base)]
        rows.append(100 * (means[0] / means[1] - 1))
    return np.stack(rows), steps


def every_of(name: str) -> int:
    """Return the steps between meetings of a run such as ``H30 4 bits``."""
    found = ISLANDS.fullmatch(name)
    assert found is not None, "islands"
    return int(found[1])


def losses_in(folder: Path) -> Values:
    """Return the losses of a log, by step."""
    records = read_lines(folder / "loss.jsonl")
    return np.array([record["loss"] for record in records if "loss" in record])


def meetings_until(gaps: Values) -> str:
    """Return after how many meetings all further gaps are below NEAR; ``never`` for none."""
    far = np.flatnonzero(gaps > NEAR)
    first = int(far[-1]) + 1 if len(far) else 0
    return "never" if first >= len(gaps) else str(first)
