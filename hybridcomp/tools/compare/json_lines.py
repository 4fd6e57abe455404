"""Read trainings from JSON lines: a log with header, steps and summary, and hybridcomp's ledger.

The log is what ``train_gpt.py --log`` and ``HYBRIDCOMP_RECORD`` write: ``{"run": {..}}``,
then a record with ``step``, ``loss`` and more (``metric_names.py``) for each step, then
``{"summary": true, ..}``. Between them there may be records of evaluations, as loops with a
callback of Hugging Face's Trainer write.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from hybridcomp.escaping import parsed_json
from hybridcomp.metric_names import LOSS, SPEED, TOKENS, VALID_LOSS
from hybridcomp.tools.compare.figures import named, sent_until
from hybridcomp.tools.compare.runs import (
    CompareError,
    Curve,
    Errors,
    LoggedTraining,
    Rows,
    check_curve,
    rises,
)

#: name of the log in the folder of a run
LOG = "loss.jsonl"
#: keys of an evaluation's loss; the last one counts
EVALUATIONS = (VALID_LOSS, "eval_loss", "eval/loss", "validation_loss")
#: key of the record that closes a run of the Trainer
CLOSING = "train_runtime"


def read_training(path: Path, ledger: str) -> LoggedTraining:
    """Read a log, and the file ``ledger`` in the log's folder if it exists. Raises CompareError."""
    header: dict[str, Any] = {}
    valid_loss = None
    records = []
    for record in read_lines(path):
        if "run" in record:
            header |= record["run"]  # the recorder repeats the header when it knows more
        elif record.get("summary"):
            valid_loss = record.get(VALID_LOSS, valid_loss)
        elif {"step", LOSS} <= record.keys():
            records.append(record)
        elif evaluated := [record[key] for key in EVALUATIONS if key in record]:
            valid_loss = evaluated[0]
        elif CLOSING not in record:
            raise CompareError(
                f"{path}: expected records with step and loss, found {sorted(record)}; "
                "HYBRIDCOMP_RECORD=FILE writes them, of any DeepSpeed job under hybridcomp.run"
            )
    if not (valid_loss is None or _is_number(valid_loss)):
        raise CompareError(f"{path}: its last valid loss is {valid_loss!r}; expected a number")
    steps, losses = _column(records, "step"), _column(records, LOSS)
    assert steps is not None and losses is not None
    check_curve(path, steps, losses)
    tokens, seconds = _column(records, TOKENS), _column(records, "seconds")
    if tokens is not None and not rises(tokens):
        raise CompareError(f"{path}: its tokens do not rise; expected all since the run began")
    if seconds is not None and not (seconds >= 0).all():
        raise CompareError(f"{path}: expected seconds of 0 or more in each record of a step")
    beside = path.with_name(ledger)
    return LoggedTraining(
        source=path,
        steps=steps,
        losses=losses,
        tokens=tokens,
        seconds=None if seconds is None else np.cumsum(seconds),
        speeds=_column(records, SPEED),
        identity=identity_of(header),
        settings=header.get("deepspeed"),
        valid_loss=valid_loss,
        **(figures_beside(beside, steps) if beside.is_file() else {}),
    )


def identity_of(header: dict[str, Any]) -> dict[str, Any]:
    """Return header parts that compared runs have to share. Raises ValueError for wrong types."""
    found = {key: header[key] for key in ("seed", "model") if header.get(key) is not None}
    if not isinstance(found.get("seed", 0), int):
        raise ValueError(f"its seed is {found['seed']!r}, and no whole number")
    if not isinstance(header.get("deepspeed") or {}, dict):
        raise ValueError("what it says of DeepSpeed's settings is no object")
    if not isinstance(found.get("model", {}), dict):
        raise ValueError("what it says of its model is no object")
    data = dict(header.get("data") or {})
    if "tokens_per_step" in header:
        data["tokens_per_step"] = header["tokens_per_step"]
    return {**found, "data": data}


def read_ledger(path: Path) -> Rows:
    """Read a ledger's totals. Raises CompareError for a truncated file or another one."""
    records = read_lines(path)
    if not records or "dimensions" not in records[-1]:
        raise CompareError(
            f"{path}: expected hybridcomp's ledger, records with dimensions; found none"
        )
    if not records[-1].get("summary"):
        raise CompareError(f"{path}: the summary at the end is missing; did the run end early?")
    rows: Rows = records[-1]["dimensions"]
    needed = {"codec", "raw_MB", "wire_MB", "ratio"}
    for dimension, ways in rows.items():
        for way, row in ways.items():
            for figure in row.items():
                _check_figure(path, *figure)
            if row.get("error") is not None:
                row["error"] = float(row["error"])  # "Infinity" where values became non-finite
            if not needed <= row.keys():
                raise CompareError(
                    f"{path}: {dimension} {way} lacks {sorted(needed - row.keys())}; it was "
                    "written by another version of hybridcomp"
                )
    return rows


def figures_beside(path: Path, steps: Curve) -> dict[str, Any]:
    """Return the fields of a training that the ledger at ``path`` has. Raises CompareError.

    ``sent``: MB sent by all ranks up to each of ``steps``. What the summary counts in excess of the
    reports is added at the last step.
    """
    rows, errors = read_ledger(path), Errors()
    reports: list[tuple[float, float]] = []
    for record in read_lines(path):
        ways = [(named(dimension, way), row) for dimension, ways in record["dimensions"].items()
                for way, row in ways.items()]  # fmt: skip
        sent = sum(float(row.get("wire_MB") or 0.0) for _, row in ways)
        if record.get("summary"):
            reports.append((steps[-1], max(0.0, sent - sum(before for _, before in reports))))
            continue
        reports.append((float(record["step"]), sent))
        for name, row in ways:
            if row.get("error") is not None:
                errors.setdefault(name, []).append((float(record["step"]), float(row["error"])))
    return {"ledger": rows, "sent": sent_until(reports, steps), "errors": errors}


def _check_figure(path: Path, name: str, value: object) -> None:
    """Raise CompareError for a figure of a ledger that is no number, or a codec without name."""
    optional = name in ("ratio", "error", "codec_ms") and value is None
    figures = ("raw_MB", "wire_MB", "ratio", "error", "codec_ms")
    endless = name == "error" and value in ("Infinity", "NaN", math.inf)
    if name in figures and not (optional or endless or _is_number(value)):
        raise CompareError(f"{path}: {name} is {value!r}; expected a number")
    if name == "codec" and not isinstance(value, str):
        raise CompareError(f"{path}: codec is {value!r}; expected a name")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _column(records: list[dict[str, Any]], name: str) -> Curve | None:
    """Return the value ``name`` of all records; None if a record lacks it."""
    if not all(name in record for record in records):
        return None
    return np.array([record[name] for record in records], dtype=np.float64)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one a line. Raises CompareError."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = parsed_json(text)
        except ValueError as error:
            raise CompareError(
                f"{path}:{number}: expected JSON, found {text[:40]!r} ({error})"
            ) from None
        if not isinstance(record, dict):
            raise CompareError(f"{path}:{number}: expected a JSON object, found {text[:40]!r}")
        found.append(record)
    return found
