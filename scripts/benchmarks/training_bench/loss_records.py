"""Store one small file per training of the loss study, written when the training has ended.

These files are a study's whole state on disk. Only the study's process writes them, after the ranks
have ended. A training with a file is not repeated, unless the file is damaged, which is reported.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.training_bench.gpu_losses import Case, Method, settings_of

SUFFIX = ".json.gz"
#: digits of displayed figures; losses keep all digits
SHOWN = {"seconds": 4, "tokens_per_second": 0, "learning_rate": 9}
#: digits of the losses of an evaluation's batches
BATCH_DIGITS = 6
#: exceptions from reading a damaged file
DAMAGED = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)
Record = dict[str, Any]


def file_of(out: Path, case: Case) -> Path:
    """Return the path of a training's file."""
    return out / f"{case.stem}{SUFFIX}"


def write(out: Path, logs: Path, case: Case, method: Method, seconds: dict[str, float]) -> Record:
    """Pack log, ledger and settings of a training whose files are below ``logs``.

    ``seconds``: time of start, steps and evaluations. Returns the written record. Raises ValueError
    unless the log is that of one whole training.
    """
    folder = case.folder(logs)
    log = [shortened(each) for each in _lines(folder / "loss.jsonl")]
    steps = [line["step"] for line in log if "step" in line]
    if steps != list(range(1, method.steps + 1)):
        raise ValueError(f"{folder / 'loss.jsonl'}: expected {method.steps} steps, each once, "
            f"found {len(steps)} lines of steps")  # fmt: skip
    record = {
        "case": asdict(case),
        "method": asdict(method),
        "settings": settings_of(case, method, Path("ledger.jsonl")),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "log": log,
        "ledger": _lines(folder / "ledger.jsonl"),
    }
    out.mkdir(parents=True, exist_ok=True)
    file = file_of(out, case)
    partial = file.with_name(f"{file.name}.part")
    partial.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), mtime=0))
    os.replace(partial, file)
    return record


def shortened(line: Record) -> Record:
    """Return a log line with fewer digits in figures that are not compared."""
    short: Record = {
        name: round(value, SHOWN[name])
        if name in SHOWN
        else [round(one, BATCH_DIGITS) for one in value]
        if name == "valid_losses"
        else value
        for name, value in line.items()
    }
    if "run" in short:  # paths of the training machine
        run = {key: value for key, value in short["run"].items() if key != "deepspeed_config"}
        settings = dict(run.get("deepspeed", {}))
        if "compression" in settings:
            settings["compression"] = {**settings["compression"], "ledger": {}}
        short["run"] = {**run, "deepspeed": settings}
    return short


def _lines(file: Path) -> list[Record]:
    if not file.is_file():
        return []
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]


def read(file: Path) -> tuple[Case, Record]:
    """Return a training and its record. Raises ValueError for a damaged file."""
    try:
        record = json.loads(gzip.decompress(file.read_bytes()))
        case = Case(**record["case"])
        whole = bool(record["log"]) and bool(record["settings"]) and bool(record["method"])
        if not whole or file.name != f"{case.stem}{SUFFIX}":
            raise ValueError("it holds another training, or a part of one")
    except DAMAGED as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file.name}: damaged ({said})") from None
    return case, record


def kept(out: Path, say: Callable[[str], None]) -> dict[Case, Record]:
    """Return all records in ``out``; reports and skips damaged files."""
    found = {}
    for file in sorted(out.glob(f"*{SUFFIX}")):
        try:
            case, record = read(file)
        except ValueError as error:
            say(f"{error}; this training counts as not made")
        else:
            found[case] = record
    return found


def by_arm(records: Mapping[Case, Record]) -> dict[str, dict[int, Record]]:
    """Return records by arm and seed."""
    runs: dict[str, dict[int, Record]] = {}
    for case, record in records.items():
        runs.setdefault(case.name, {})[case.seed] = record
    return runs


def pair_seconds(records: Mapping[int, Record]) -> float:
    """Return the median duration of these seeds' pairs from their first step."""
    found: float = statistics.median(one["seconds"]["pair"] for one in records.values())
    return found
