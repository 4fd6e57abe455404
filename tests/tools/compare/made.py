"""Synthetic logs of trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEPS = 60
ROW: dict[str, Any] = {
    "codec": "blockint(bits=4)", "messages": 60, "raw_MB": 150.0, "wire_MB": 20.0, "ratio": 7.5,
    "codec_ms": 1500.0, "wait_ms": 10.0, "error": 0.1,
}  # fmt: skip
HEADER: dict[str, Any] = {
    "model": {"layers": 4, "width": 128},
    "data": {"content": "aa", "order": "bb"},
    "tokens_per_step": 100,
}


def record(step: int, loss: float) -> dict[str, Any]:
    """Return the record of one step of a training with one second per step."""
    return {
        "step": step, "loss": loss, "tokens": 100 * step, "tokens_per_second": 100.0,
        "seconds": 1.0,
    }  # fmt: skip


def write_run(
    folder: Path,
    seed: int | None,
    factor: float,
    *,
    ledger: bool = False,
    steps: int = STEPS,
    every: int = 1,
    seconds: float = 1.0,
    **header: Any,
) -> Path:
    """Write a falling curve times ``factor``; return the log's path."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    if seed is not None:
        records.append({"run": {**HEADER, "seed": seed, **header}})
    for step in range(every, steps + 1, every):
        loss = factor * (2 + 3 / step + 0.01 * (seed or 0))
        records.append({**record(step, loss), "seconds": every * seconds})
    records.append({"summary": True, "steps": steps, "valid_loss": 2.5 * factor})
    path = folder / "loss.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if ledger:
        lines = [
            {"step": 10, "dimensions": {"dp": {"forward": ROW}}},
            {"summary": True, "step": steps, "dimensions": {"dp": {"forward": ROW}}},
        ]
        (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
