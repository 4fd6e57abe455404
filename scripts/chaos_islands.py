#!/usr/bin/env python3
"""Repeatedly kill, stop and pause islands, each a separate job, in one run.

    python scripts/chaos_islands.py                      # 100 strikes, 10 to 20 minutes
    python scripts/chaos_islands.py --strikes 10 --seed 3
    python scripts/chaos_islands.py --preset streaming   # with fragments and delayed averages
    python scripts/chaos_islands.py --strikes 1 --kinds away   # 4 islands, then 3, then 4

Each island is a process that trains (``fuzzing/island_job.py``). A strike kills the process and
restarts it, at once or after the other islands have met without it, or stops the process for a
longer or shorter time than the other islands wait for it. At least two islands run undisturbed at
any time. Checks:

* no meeting took longer than two time-outs plus the start of a process, and all islands ended,
* islands at the same meeting have bit-identical averages after it,
* an island missed a meeting only after a strike, and other islands lost no step,
* the mean loss after the last meetings, of the averaged weights and of each island's own weights,
  exceeds the highest loss of undisturbed runs (other seeds, as many meetings) by at most three
  standard deviations of these runs' losses.

Prints the results as JSON; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import one_gpu  # noqa: E402
from fuzzing import island_job, jobs  # noqa: E402
from hybridcomp.sync.rendezvous import Rendezvous  # noqa: E402
from hybridcomp.sync.store_line import StoreLine  # noqa: E402
from hybridcomp.tools.commands import rendezvous  # noqa: E402

NAMES = "abcdefgh"
KINDS = ("kill", "away", "stop", "pause")
#: imports of an island, preloaded since they take seconds of a core
PRELOAD = [
    "torch._dynamo", "torch._inductor.compile_fx", "fuzzing.island_job",
    "hybridcomp.patches.torch.attach", "hybridcomp.patches.torch.ddp.ddp", "hybridcomp.sync",
]  # fmt: skip
#: final meetings whose mean loss is compared
LAST = 10
#: seconds that a process needs to start on a busy machine
START_S = 30.0


class Struck:
    """An island with its processes and the strikes on it."""

    def __init__(self, context: ForkServerContext, first: island_job.Island) -> None:
        self.context, self.island = context, first
        self.back_at, self.stopped = 0.0, False  # when a strike ends; 0: none is active
        self.process = self._start()

    def _start(self) -> BaseProcess:
        process = self.context.Process(target=island_job.train, args=(self.island,), daemon=True)
        process.start()
        return process

    def strike(self, kind: str, seconds: float) -> None:
        """End or stop the process for ``seconds``, after which ``settle`` undoes it."""
        assert self.process.pid is not None
        self.stopped = kind in ("stop", "pause")
        os.kill(self.process.pid, signal.SIGSTOP if self.stopped else signal.SIGKILL)
        self.back_at = time.monotonic() + seconds

    def settle(self) -> None:
        """Resume the stopped process, or start a new one, once the strike's time is over."""
        if not self.back_at or time.monotonic() < self.back_at:
            return
        assert self.process.pid is not None
        self.back_at = 0.0
        if self.stopped:
            os.kill(self.process.pid, signal.SIGCONT)
            return
        self.process.join()
        values = {**vars(self.island), "life": self.island.life + 1}
        self.island = island_job.Island(**values)
        self.process = self._start()


@contextmanager
def run(
    context: ForkServerContext, folder: Path, args: argparse.Namespace, **own: Any
) -> Iterator[tuple[list[Struck], Rendezvous]]:
    """Open a rendezvous and start the islands of a run."""
    port = one_gpu.free_port()
    server = context.Process(target=rendezvous.run, args=(port,), daemon=True)
    server.start()
    line = StoreLine("127.0.0.1", port, START_S * 4)
    folder.mkdir()
    values = {"timeout_s": args.timeout, "islands": args.islands, "preset": args.preset, **own}
    islands = [
        Struck(context, island_job.Island(folder, name, 0, line.address, **values))
        for name in NAMES[: args.islands]
    ]
    try:
        yield islands, Rendezvous(line, 0, args.islands, args.timeout, 1.0)
    finally:
        for process in (*(one.process for one in islands), server):
            process.kill()
            process.join()


def finish(folder: Path, islands: Sequence[Struck], meeting: int, seconds: float) -> list[str]:
    """Make all islands end after ``meeting``; return those that do not end normally."""
    part = folder / "end.part"
    part.write_text(str(meeting))
    part.rename(folder / island_job.END)
    deadline = time.monotonic() + seconds
    for one in islands:
        one.process.join(max(0.1, deadline - time.monotonic()))
    return [
        f"{o.island.name} ended with {o.process.exitcode}" for o in islands if o.process.exitcode
    ]


def disturb(
    islands: Sequence[Struck], meet: Rendezvous, args: argparse.Namespace
) -> tuple[list[tuple[str, str, int]], list[str], float]:
    """Strike islands; return the strikes, the problems and the longest time without a meeting."""
    chance = random.Random(args.seed)
    strikes: list[tuple[str, str, int]] = []
    wrong: list[str] = []
    limit = 2 * args.timeout + START_S
    held, since, longest, due = 0, time.monotonic(), 0.0, 0.0
    while len(strikes) < args.strikes or any(one.back_at for one in islands):
        time.sleep(0.05)
        now, count = time.monotonic(), meet.decisions()
        if count > held:
            longest = max(longest, now - since) if held else 0.0
            held, since, due = count, now, due or now + 1.0
        if now - since > limit + (4 * START_S if not held else 0.0):
            return strikes, [f"no meeting after {held} for {now - since:.0f} s"], longest
        for one in islands:
            one.settle()
            if not one.back_at and one.process.exitcode is not None:
                return strikes, [f"{one.island.name} ended: {one.process.exitcode}"], longest
        calm = [one for one in islands if not one.back_at and _is_member(one, meet, held)]
        if due and now >= due and len(strikes) < args.strikes and len(calm) > 2:
            one, kind = chance.choice(calm), args.kinds[len(strikes) % len(args.kinds)]
            wait = {"kill": 0.0, "away": 1.5, "stop": 1.5, "pause": 0.2}[kind] * args.timeout
            one.strike(kind, wait)
            strikes.append((one.island.name, kind, held))
            print(f"{len(strikes)} strikes, {held - 1} meetings", file=sys.stderr, flush=True)
            due = now + chance.uniform(0.3, 0.8) * args.timeout
    return strikes, wrong, longest


def _is_member(one: Struck, meet: Rendezvous, decisions: int) -> bool:
    """Return whether the island's current process took part in the last meeting."""
    last = meet.decision(decisions - 1) if decisions else None
    lines = one.island.log.read_text().splitlines() if one.island.log.exists() else []
    return last is not None and bool(lines) and json.loads(lines[-1])["island"] in last.present


def lines_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Return each process's lines; a killed process may leave a truncated last line."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        texts = [text for text in path.read_text().split("\n")[:-1] if text]
        found.append([json.loads(text) for text in texts])
    return found


def judge(
    folder: Path, meet: Rendezvous, strikes: Sequence[tuple[str, str, int]]
) -> tuple[dict[str, Any], list[str]]:
    """Check the islands' lines; return figures and problems."""
    lives, wrong = lines_of(folder), []
    digests: dict[int, set[str]] = {}
    for line in (line for life in lives for line in life):
        digests.setdefault(line["meeting"], set()).add(line["digest"])
    wrong += [f"meeting {n}: {len(d)} different weights" for n, d in digests.items() if len(d) > 1]
    lost = 0
    for life in lives:
        for before, after in zip(life, life[1:], strict=False):
            steps, number = after["steps"] - before["steps"], after["meeting"] - before["meeting"]
            right = (after["clock"] - before["clock"], 1)
            if before["island"] == after["island"] and (steps, number) != right:
                wrong.append(f"{after['island']}: {steps} steps to meeting {after['meeting']}")
            lost += before["island"] != after["island"]
    rosters = [roster for n in range(meet.decisions()) if (roster := meet.decision(n)) is not None]
    silent = Counter(one.partition("#")[0] for roster in rosters for one in roster.silent)
    struck = Counter(name for name, _, _ in strikes)
    wrong += [
        f"{n} was left out {c} times, struck {struck[n]}"
        for n, c in silent.items()
        if c > struck[n]
    ]
    losses = {line["meeting"]: line["loss"] for life in lives for line in life}
    last = [losses[number] for number in sorted(losses)[-LAST:]]
    figures = {
        "meetings": len(rosters) - 1,
        "strikes": dict(Counter(kind for _, kind, _ in strikes)),
        "left out": sum(silent.values()),
        "stopped ones that came back by themselves": lost,
        "processes": len(lives),
        "islands at a meeting": dict(sorted(Counter(len(r.present) for r in rosters[1:]).items())),
        "loss": statistics.mean(last),
        "own losses": own_losses(lives),
    }
    return figures, wrong


def own_losses(lives: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Return each island's mean loss of its own weights in its last process' last meetings."""
    known = sorted((life for life in lives if life), key=lambda life: life[-1]["meeting"])
    of = {life[-1]["island"].partition("#")[0]: life for life in known}  # its last process
    return [statistics.mean(line["own"] for line in life[-LAST:]) for life in of.values()]


def compare(figures: dict[str, Any], calm: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Compare losses with those of undisturbed runs; return a line for each that is too high."""
    shared = [one["loss"] for one in calm]
    own = [loss for one in calm for loss in one["own losses"]]
    for name, found, like in (
        ("loss", figures["loss"], shared),
        ("own loss", max(figures["own losses"]), own),
    ):
        spread = 3 * statistics.stdev(like)
        if found > max(like) + spread:
            yield f"{name} {found:.4f}, undisturbed {max(like):.4f} + {spread:.4f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    args = arguments(argv)
    context, began = jobs.server(), time.monotonic()
    context.set_forkserver_preload([*jobs.PRELOAD, *PRELOAD])
    with tempfile.TemporaryDirectory(prefix="islands") as whole:
        folder = Path(whole, "struck")
        with run(context, folder, args, seed=args.seed, pause_s=args.pause) as (islands, meet):
            strikes, wrong, longest = disturb(islands, meet, args)
            end = meet.decisions() + 20
            wrong += [] if wrong else finish(folder, islands, end, 4 * START_S)
            figures, more = judge(folder, meet, strikes)
            wrong += more
        figures |= {"longest_s": round(longest, 1), "timeout_s": args.timeout}
        figures["seconds"] = round(time.monotonic() - began)
        print(json.dumps({**figures, "wrong": wrong}), file=sys.stderr, flush=True)
        calm = []
        for seed in range(args.seed, args.seed + args.calm):
            folder = Path(whole, f"calm{seed}")
            with run(context, folder, args, seed=seed, pause_s=0.0) as (islands, meet):
                wrong += finish(folder, islands, figures["meetings"], 20 * START_S)
                calm.append(judge(folder, meet, [])[0])
    figures["calm losses"] = [one["loss"] for one in calm]
    figures["calm own losses"] = sorted(loss for one in calm for loss in one["own losses"])
    if len(calm) > 2:
        wrong += compare(figures, calm)
    print(json.dumps({**figures, "wrong": wrong}, indent=2))
    return 1 if wrong else 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strikes", type=int, default=100, metavar="N")
    parser.add_argument("--islands", type=int, default=4, metavar="N", help="3 to 8")
    parser.add_argument("--preset", choices=[*island_job.RULES], default="diloco")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of strikes")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="of meetings")
    parser.add_argument("--pause", type=float, default=0.02, metavar="S", help="of each step")
    parser.add_argument("--calm", type=int, default=4, metavar="N", help="undisturbed runs")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    if not 3 <= args.islands <= len(NAMES):
        parser.error(f"--islands: found {args.islands}; expected 3 to {len(NAMES)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
