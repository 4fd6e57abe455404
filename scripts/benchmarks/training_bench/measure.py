"""Measure missing cells of a layout, all arms at once."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared import say
from benchmarks.training_bench import cells, machine
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE, Arm, Sizes
from benchmarks.training_bench.kept import Kept, name_of
from benchmarks.training_bench.runners import CellError, Steps, network
from benchmarks.training_bench.session import Session
from benchmarks.training_bench.turns import Job
from lab.layout import BURST_S

#: native bf16 steps at unlimited speed, which determine the link rate
LOOKS = 6
#: seconds between progress lines of a running session
QUIET_S = 20.0


def by_step(ranks: Sequence[Steps]) -> list[float]:
    """Return the seconds of every step, each that of its slowest rank."""
    return [max(step["seconds"] for step in each) for each in zip(*ranks, strict=False)]


def summary(ranks: Sequence[Steps], per_node: int, length: int) -> dict[str, Any]:
    """Summarize the steps of all ranks. ``length``: tokens per sequence."""
    seconds = by_step(ranks)
    if not seconds:
        raise CellError("expected more steps, found none that is timed")
    # ranks of a node share its interface: use the first one's counters
    first = ranks[::per_node]
    sent = [max(step["sent"] for step in each) for each in zip(*first, strict=False)]
    return {
        "seconds": statistics.median(seconds),  # per step
        "steps": seconds,
        "sent": statistics.median(sent),  # bytes per step of the node that sends most
        "tokens": int(ranks[0][0]["tokens"]) * length,  # per step
        "loss": statistics.fmean(step["loss"] for step in ranks[0]),
    }


class Bench:
    """Runs cells and stores them under ``options.out``; options: bench_training's."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kept = Kept(options.out, options.sizes, options.loopback)
        self._spoke = 0.0  # time of a session's last progress line

    def run(
        self, layout: str, arms: list[Arm], ratios: list[float | None], repetitions: int
    ) -> list[dict[str, Any]]:
        """Measure all cells of a layout at every ratio (None: no limit).

        Reuses stored cells and measures the other arms together with native bf16, as many at once
        as fit the memory. Raises CellError if native bf16 fails.
        """
        found, begin = [], time.monotonic()
        place = LAYOUTS[layout]
        beside = max(1, self.options.processes // (place.nodes * place.per_node) - 2)
        todo = {
            (ratio, repetition): self.kept.missing(layout, arms, ratio, repetition)
            for ratio in ratios
            for repetition in range(repetitions)
        }
        total, done = sum(map(len, todo.values())), 0
        for (ratio, repetition), missing in todo.items():
            others = [arm for arm in missing if arm.name != REFERENCE]
            parts = [others[i : i + beside] for i in range(0, len(others), beside)]
            for part in parts or [[]] * bool(missing):
                for record in self._side_by_side(layout, part, ratio, repetition):
                    done += 1
                    left = (time.monotonic() - begin) / done * max(0, total - done)
                    say(line(done, total, name_of(ratio), record, left))
            found += self.kept.of(layout, arms, ratio, repetition)
        return found

    def _side_by_side(
        self, layout: str, arms: list[Arm], ratio: float | None, repetition: int
    ) -> list[dict[str, Any]]:
        """Measure native bf16 and ``arms`` at once; store and return their records or failures."""
        options, began = self.options, time.monotonic()
        busy = machine.wait_until_quiet(options.busy, options.patience, options.force)
        arms, load = [Arm(REFERENCE), *arms], os.getloadavg()[0]
        say(f"{layout} {name_of(ratio)}: {len(arms)} trainings side by side")
        self._spoke = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rate, compute, ends = self._trained(folder, layout, arms, ratio)
            if isinstance(ends[0], CellError):
                raise CellError(f"{layout}: {REFERENCE} itself fails: {ends[0]}")
            common = {
                "layout": layout, "ratio": ratio, "repetition": repetition, "rate": rate,
                "busy": busy, "load": load, "burst_ms": 1e3 * BURST_S, "compute": compute,
                "native": by_step(ends[0]), "native_sent": self._summary(layout, ends[0])["sent"],
                "wall": time.monotonic() - began,
            }  # fmt: skip
            found = []
            for arm, ranks in zip(arms, ends, strict=True):
                own: dict[str, Any] = {"failed": str(ranks)}
                if not isinstance(ranks, CellError):
                    own = self._summary(layout, ranks)
                found.append({"arm": arm.name, **common, **own})
        for arm, record in zip(arms, found, strict=True):
            if self.kept.missing(layout, [arm], ratio, repetition):
                self.kept.add(layout, arm, ratio, repetition, record)
        return found

    def _trained(
        self, folder: str, layout: str, arms: list[Arm], ratio: float | None
    ) -> tuple[int | None, list[float], list[list[Steps] | CellError]]:
        """Return bits per second, seconds of native bf16 without a limit, and timed steps per arm.

        If ``ratio`` limits the network, a second native bf16 training runs without the limit. Its
        first steps determine the rate; its later steps, in turn with the arms, give the actual r.
        """
        options, place = self.options, LAYOUTS[layout]
        warm, timed = options.sizes.warm, options.sizes.steps
        with (
            network(place, options.loopback) as runner,
            Session(runner, place, options.timeout) as session,
        ):
            rate, free = None, None
            if ratio is not None:
                sizes = replace(options.sizes, steps=LOOKS + warm + timed)
                free = session.start(self._command(folder, layout, arms[0], sizes))
                for _ in range(warm + LOOKS):
                    free.step()
                rate = self._rate(layout, free.said, ratio)
                runner.shape(rate)
            jobs: list[Job] = []
            for arm in arms:
                jobs.append(session.start(self._command(folder, layout, arm)))
                self._progress(f"{layout} {name_of(ratio)}: {len(jobs)} of {len(arms)} started")
            for cycle in range(warm + timed):
                if free is not None:
                    runner.shape(None)
                    free.step()
                    runner.shape(rate)
                for job in jobs[:: 1 if cycle % 2 == 0 else -1]:
                    job.step()
                self._progress(f"{layout} {name_of(ratio)}: {cycle + 1} of {warm + timed} steps")
            compute = [] if free is None else by_step(_last(session, free, timed))
            return rate, compute, [_outcome(session, job, timed) for job in jobs]

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._spoke >= QUIET_S:
            say(text)
            self._spoke = time.monotonic()

    def _summary(self, layout: str, ranks: Sequence[Steps]) -> dict[str, Any]:
        return summary(ranks, LAYOUTS[layout].per_node, self.options.sizes.length)

    def _rate(self, layout: str, said: Sequence[Steps], ratio: float) -> int:
        """Return the link rate in bits/s at which a step's bytes take ``ratio`` step times."""
        found = self._summary(layout, [steps[-LOOKS:] for steps in said])
        seconds, nbytes = float(found["seconds"]), float(found["sent"])
        return max(8000, round(8 * nbytes / (ratio * seconds)))

    def _command(self, folder: str, layout: str, arm: Arm, sizes: Sizes | None = None) -> list[str]:
        options, sizes = self.options, sizes or self.options.sizes
        config = _ledger(folder, arm).with_suffix(f".{sizes.steps}.json")
        settings = cells.settings_of(layout, arm, sizes, _ledger(folder, arm))
        config.write_text(json.dumps(settings))
        return cells.command_of(layout, arm, sizes, config, options.data, options.seed)


def _last(session: Session, job: Job, count: int) -> list[Steps]:
    """Return the last ``count`` steps of all ranks. Raises CellError."""
    return [steps[-count:] for steps in session.steps(job)]


def _outcome(session: Session, job: Job, count: int) -> list[Steps] | CellError:
    try:
        return _last(session, job, count)
    except CellError as error:
        return error


def _ledger(folder: str, arm: Arm) -> Path:
    return Path(folder, f"{arm.stem}.ledger.jsonl")


def line(number: int, total: int, where: str, record: dict[str, Any], left: float) -> str:
    """Return the progress line of a cell."""
    head = f"{number}/{total} {record['layout']} {where} {record['arm']}:"
    if "failed" in record:
        return f"{head} FAILED {record['failed']}"
    return (
        f"{head} {record['seconds'] * 1e3:.0f} ms, {record['sent'] / 1e6:.2f} MB a step  "
        f"(busy {record['busy']:.0%}, load {record['load']:.1f}; about {left / 60:.0f} min left)"
    )
