"""The page of the results: every configuration, and what its readers want to know of all."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

HEAD = """\
# Plans against trainings

How near `hybridcomp plan` comes. Ranks are nodes of a netlab on the two cores of one machine (gloo,
fp32). Each plays a processor of its own: of two ranks one that is half as fast as a core, of four
one that is two and a half times slower, so that each is as fast beside the others as alone and
cores are left for what moves bytes (`scripts/lab/slow_processors.py`). The example GPT has 4 layers
of width 256, a step 16 samples of 128 tokens. Every configuration was trained with the planner's
own files, all of them side by side, of which one at a time makes a step. At each rate `hybridcomp
measure` ran between the turns. Others share the cores of this machine, which makes all that
runs on them up to one and a half times slower for seconds: so a block of a transformer ran between
any two steps, and what a rank computes is predicted at the speed that this block had. Of several
measurements the one counts whose block was fastest, of steps, and of blocks (the mean over the
ranks), the mean of the fastest half. That block and the measurement are all that predictions come
from; nothing is fitted to the trainings. Measured: the steps of the slowest rank.
"""
COMMANDS = """\
## Commands

```
scripts/prepare_data.py --output data/text
python scripts/bench/bench_plan.py trainings --ranks 2
python scripts/bench/bench_plan.py trainings --ranks 4
python scripts/bench/bench_plan.py slow
python scripts/bench/bench_plan.py report
```
"""
#: what the planner aims at: rank correlation, median and p90 of the miss, loss of the chosen plan
AIMS = (0.9, 0.06, 0.12, 0.05)
LEAST_ROWS, LEAST_RATES = 16, 3
#: how much faster the planned stages are to be where a rank is slowed by half
SLOW_AIM = 0.25


class Row(NamedTuple):
    """One configuration at one rate."""

    ranks: int
    rate: str
    layout: str
    block: str
    predicted: float
    measured: float

    @property
    def miss(self) -> float:
        """Return the measured seconds over the predicted ones, less 1."""
        return self.measured / self.predicted - 1

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks {self.rate:>8} {self.layout:20} {self.block:12} predicted "
            f"{self.predicted:6.3f} s, measured {self.measured:6.3f} s, {self.miss:+6.1%}"
        )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    ranks = [[float(sorted(values).index(value)) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def told(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the figures of some rows, and what the chosen plan of each rate costs."""
    yield _figures(f"{len(rows)} configurations", rows)
    for (ranks, rate), found in groupby(rows, key=lambda row: (row.ranks, row.rate)):
        own = list(found)
        chosen = min(own, key=lambda row: row.predicted)
        best = min(own, key=lambda row: row.measured)
        yield (
            f"{_figures(f'{ranks} ranks, {rate}', own)} {chosen.layout}, {chosen.block} is chosen: "
            f"{chosen.measured / best.measured - 1:.1%} slower than the fastest ({best.layout}, "
            f"{best.block})."
        )


def _figures(name: str, rows: Sequence[Row]) -> str:
    misses = sorted(abs(row.miss) for row in rows)
    rank = spearman([row.predicted for row in rows], [row.measured for row in rows])
    return (
        f"{name}: Spearman {rank:.3f}, miss {statistics.median(misses):.1%} median, "
        f"{_p90(misses):.1%} p90."
    )


def _p90(ordered: Sequence[float]) -> float:
    """Return the value that nine of ten do not exceed, by nearest rank."""
    return ordered[math.ceil(0.9 * len(ordered)) - 1]


def page(folder: Path) -> str:
    """Return the page of the folder's rows. Raises FileNotFoundError where it has none."""
    rows = [Row(**row) for path in sorted(folder.glob("rows*.json"))
            for row in json.loads(path.read_text())]  # fmt: skip
    if not rows:
        raise FileNotFoundError(f"{folder}: no rows; run bench_plan.py trainings first")
    parts = [HEAD, "\n".join(_table(rows)), "\n".join(f"* {line}" for line in told(rows)),
             "\n".join(_verdict(rows))]  # fmt: skip
    if (folder / "slow.json").is_file():
        parts.append("\n".join(_slow(json.loads((folder / "slow.json").read_text()))))
    notes = folder / "notes.md"
    if notes.is_file():
        parts.append(notes.read_text().rstrip())
    return "\n\n".join(part.rstrip() for part in (*parts, COMMANDS)) + "\n"


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| ranks | rate | layout | block | predicted s | measured s | miss |"
    yield "|---|---|---|---|---|---|---|"
    for r in rows:
        yield (f"| {r.ranks} | {r.rate} | {r.layout} | {r.block} | {r.predicted:.3f} "
               f"| {r.measured:.3f} | {r.miss:+.1%} |")  # fmt: skip


def _verdict(rows: Sequence[Row]) -> Iterator[str]:
    misses = sorted(abs(row.miss) for row in rows)
    found = (
        spearman([row.predicted for row in rows], [row.measured for row in rows]),
        statistics.median(misses),
        _p90(misses),
    )
    held = [found[0] >= AIMS[0], found[1] <= AIMS[1], found[2] <= AIMS[2]]
    names = (f"Spearman {AIMS[0]}", f"{AIMS[1]:.0%} median", f"{AIMS[2]:.0%} for nine of ten")
    said = [
        f"{name} is {'' if ok else 'not '}reached" for name, ok in zip(names, held, strict=True)
    ]
    rates = len({row.rate for row in rows})
    asked = ""
    if len(rows) < LEAST_ROWS or rates < LEAST_RATES or len({row.ranks for row in rows}) < 2:
        asked = (
            f" They ask for at least {LEAST_ROWS} configurations over {LEAST_RATES} rates, of 2 "
            f"and 4 ranks: here are {len(rows)} over {rates}, so this is a part of what was asked."
        )
    yield f"Of the aims, {', '.join(said)}.{asked}"


def _slow(found: dict[str, Any]) -> Iterator[str]:
    even, planned = found["even"], found["planned"]
    pairs = list(zip(found["even_losses"], found["planned_losses"], strict=True))
    most = max(abs(one - two) for one, two in pairs)
    speeds = ", ".join(f"{speed:.2f}" for speed in found["speeds"])
    yield "## One rank at half speed"
    yield ""
    yield "Four ranks, each on a processor two and a half times slower than a core, rank 1 on one"
    yield "five times slower. The planner was not told: its measurement found speeds of"
    yield f"{speeds}."
    yield "A pipeline of four stages over 12 blocks of width 128, 8 micro-batches:"
    yield ""
    yield "| stages | blocks | predicted s | measured s |"
    yield "|---|---|---|---|"
    for name in ("even", "planned"):
        blocks = ", ".join(map(str, found[f"{name}_cuts"]))
        yield f"| {name} | {blocks} | {found[f'{name}_predicted']:.3f} | {found[name]:.3f} |"
    yield ""
    losses = "are equal" if not most else f"differ by at most {most:.1e}"
    verdict = "reached" if even / planned >= 1 + SLOW_AIM else "not reached"
    yield (
        f"The planned steps take {1 - planned / even:.0%} less time ({even / planned - 1:.0%} "
        f"faster); {SLOW_AIM:.0%} faster is the aim, {verdict}. The losses of all {len(pairs)} "
        f"steps {losses}."
    )
