"""Calibration, cells in turn, and what is kept on disk so that nothing is measured twice."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.layout import BURST_S

from training_bench import cells, machine
from training_bench.cells import LAYOUTS, REFERENCE, Arm, Sizes
from training_bench.runners import CellError, Runner, Steps, network

#: cells of native bf16 on the unshaped network: one alone was off by a third
CALIBRATIONS = ("unshaped/0", "unshaped/1", "unshaped/2")


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    data: Path
    out: Path
    sizes: Sizes
    seed: int
    busy: float
    patience: float
    force: bool
    loopback: bool
    timeout: float
    rate_limit: float = 20e9  # bits a second; above, a link is not worth shaping here


@dataclass(frozen=True)
class Figures:
    """One cell."""

    seconds: float  # of a step, median
    sent: float  # bytes a step of the node that sends most, median
    tokens: int  # a step
    loss: float  # mean of the timed steps
    codec_s: float  # a step and rank, of the ledger; 0 without one
    rounds: float  # encoded messages of upstream a step and rank
    busy: float  # share of the cores that others used just before
    load: float
    wall: float  # seconds of the whole cell


def summary(ranks: list[Steps], sizes: Sizes, per_node: int, length: int) -> dict[str, float]:
    """Of the steps after the warm-up: a step ends when its slowest rank ends."""
    timed = [steps[sizes.warm :] for steps in ranks]
    count = min(len(steps) for steps in timed)
    if count < 1:
        raise CellError(f"expected more than {sizes.warm} steps, found {len(ranks[0])}")
    seconds = [max(steps[i]["seconds"] for steps in timed) for i in range(count)]
    # ranks of a node share its interface: the first one's counters are the node's
    sent = [max(timed[rank][i]["sent"] for rank in range(0, len(timed), per_node))
            for i in range(count)]  # fmt: skip
    return {
        "seconds": statistics.median(seconds),
        "sent": statistics.median(sent),
        "tokens": int(timed[0][0]["tokens"]) * length,
        "loss": statistics.fmean(steps["loss"] for steps in timed[0]),
    }


class Bench:
    """Runs cells and remembers them under ``options.out``."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say

    def cell(
        self, runner: Callable[[], Runner], layout: str, arm: Arm, where: str, rate: int | None
    ) -> dict[str, Any]:
        """Measure, or take what was measured with the same settings; failures are kept too."""
        options = self.options
        file = self._file(layout, arm, where)
        ledger = file.with_suffix(".ledger.jsonl")
        settings, key = self._settings(layout, arm, ledger, rate)
        kept = _read(file, key)
        if kept is not None:
            return kept
        found = machine.wait_until_quiet(options.busy, options.patience, options.force)
        load = os.getloadavg()[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        record: dict[str, Any] = {
            "key": key, "layout": layout, "arm": arm.name, "rate": rate, "busy": found,
            "load": load, "burst_ms": 1e3 * BURST_S,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "ds_config.json")
            config.write_text(json.dumps(settings))
            command = cells.command_of(
                layout, arm, options.sizes, config, options.data, options.seed
            )
            try:
                ranks = runner().run(command, LAYOUTS[layout], options.timeout)
                record |= summary(
                    ranks, options.sizes, LAYOUTS[layout].per_node, options.sizes.length
                )
                record |= coded(ledger, len(ranks) * (options.sizes.warm + options.sizes.steps))
            except CellError as error:
                record["failed"] = str(error)
        record["wall"] = time.monotonic() - started
        file.write_text(json.dumps(record, indent=1))
        return record

    def _file(self, layout: str, arm: Arm, where: str) -> Path:
        return self.options.out / layout / where / f"{arm.name.replace(' ', '_')}.json"

    def _settings(
        self, layout: str, arm: Arm, ledger: Path, rate: int | None
    ) -> tuple[dict[str, Any], str]:
        """The DeepSpeed file of a cell, and the digest of everything that its result depends on."""
        options = self.options
        settings = cells.settings_of(layout, arm, options.sizes, ledger)
        link = None if rate is None else (rate, BURST_S)
        parts = settings, asdict(arm), asdict(options.sizes), link, options.loopback
        return settings, cells.digest(*parts)

    def kept(self) -> list[dict[str, Any]]:
        """What was measured with these settings under ``options.out``, by this and earlier calls.

        By layout, ratio (the unshaped network first), arm and repetition.
        """
        found = []
        for layout in LAYOUTS:
            files = [self._file(layout, Arm(REFERENCE), where) for where in CALIBRATIONS]
            key = self._settings(layout, Arm(REFERENCE), files[0].with_suffix(""), None)[1]
            ends = [record for file in files if (record := _read(file, key)) is not None]
            if len(ends) < len(files) or any("failed" in record for record in ends):
                continue
            calibrated = _middle(ends)
            for folder in sorted((self.options.out / layout).glob("*/*"), key=_place):
                ratio, repetition = _place(folder)
                rate = self.rate_of(calibrated, ratio) if ratio else None
                for arm in cells.arms_of(layout):
                    file = self._file(layout, arm, f"{folder.parent.name}/{folder.name}")
                    ledger = file.with_suffix(".ledger.jsonl")
                    record = _read(file, self._settings(layout, arm, ledger, rate)[1])
                    if record is not None:
                        ours = {"ratio": ratio or None, "repetition": repetition}
                        found.append(record | ours)
        return found

    def calibrate(self, layout: str) -> dict[str, Any]:
        """Native bf16 where nothing is shaped: of its cells that with the median seconds."""
        ends = []
        with network(LAYOUTS[layout], None, self.options.loopback) as runner:
            for where in CALIBRATIONS:
                ends.append(self.cell(lambda: runner, layout, Arm(REFERENCE), where, None))
                if "failed" in ends[-1]:
                    raise CellError(f"{layout}: {REFERENCE} itself fails: {ends[-1]['failed']}")
        return _middle(ends)

    def rate_of(self, calibrated: dict[str, Any], ratio: float) -> int:
        """Bits a second at which the bytes of native bf16 take ``ratio`` times its compute."""
        seconds, nbytes = float(calibrated["seconds"]), float(calibrated["sent"])
        return max(8000, round(8 * nbytes / (ratio * seconds)))

    def run(
        self, layout: str, arms: list[Arm], ratios: list[float | None], repetitions: int
    ) -> list[dict[str, Any]]:
        """All cells of a layout: at each rate the arms in turn, every second time backwards.

        A ratio of None is the unshaped network.
        """
        calibrated, found = self.calibrate(layout), []
        total, number, walls = len(ratios) * repetitions * len(arms), 0, [calibrated["wall"]]
        for ratio in ratios:
            rate = None if ratio is None else self.rate_of(calibrated, ratio)
            if rate is not None and rate > self.options.rate_limit:
                self.say(
                    f"{layout} r {ratio}: {rate / 1e9:.0f} Gb/s is beyond this machine, left out"
                )
                continue
            name = "unshaped" if ratio is None else f"r{ratio:g}"
            with network(LAYOUTS[layout], rate, self.options.loopback) as runner:
                for repetition in range(repetitions):
                    order = arms if repetition % 2 == 0 else arms[::-1]
                    for arm in order:
                        number += 1
                        begin = time.monotonic()
                        record = self.cell(
                            lambda: runner, layout, arm, f"{name}/{repetition}", rate
                        )
                        record |= {"ratio": ratio, "repetition": repetition}
                        found.append(record)
                        if time.monotonic() - begin > 0.5:
                            walls.append(record["wall"])
                        left = statistics.fmean(walls) * (total - number)
                        self.say(line(number, total, name, record, left))
        return found


def _middle(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record with the median seconds; the rate of the links hangs on it."""
    return sorted(records, key=lambda record: float(record["seconds"]))[len(records) // 2]


def _read(file: Path, key: str) -> dict[str, Any] | None:
    """A cell that is there, None where it was measured with other settings."""
    if not file.is_file():
        return None
    kept: dict[str, Any] = json.loads(file.read_text())
    return kept if kept["key"] == key else None


def _place(folder: Path) -> tuple[float, int]:
    """Ratio (0: unshaped) and repetition of a folder of cells such as ``r0.25/1``."""
    name = folder.parent.name
    return 0.0 if name == "unshaped" else float(name.removeprefix("r")), int(folder.name)


def coded(ledger: Path, steps: int) -> dict[str, float]:
    """Of a ledger, over all ``steps`` of all ranks: seconds of coding, encoded messages."""
    found = {"codec_s": 0.0, "rounds": 0.0}
    if ledger.is_file():
        rows = json.loads(ledger.read_text().splitlines()[-1])["dimensions"]
        for row in (row for ways in rows.values() for row in ways.values()):
            found["codec_s"] += (row.get("codec_ms") or 0.0) / 1e3 / steps
            found["rounds"] += (row["messages"] - row["native_messages"]) / steps
    return found


def line(number: int, total: int, where: str, record: dict[str, Any], left: float) -> str:
    """The progress line of a cell."""
    head = f"{number}/{total} {record['layout']} {where} {record['arm']}:"
    if "failed" in record:
        return f"{head} FAILED {record['failed']}"
    return (
        f"{head} {record['seconds'] * 1e3:.0f} ms, {record['sent'] / 1e6:.2f} MB a step  "
        f"(busy {record['busy']:.0%}, load {record['load']:.1f}; about {left / 60:.0f} min left)"
    )
