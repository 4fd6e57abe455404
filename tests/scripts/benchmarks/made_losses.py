"""Synthetic records of loss trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.training_bench import gpu_losses as losses

METHOD = losses.Method("124M", 800, 8, 1, 3e-4, 4, 2**19, "text")
TINY = losses.Method("tiny", 40, 1, 1, 3e-4, 2, 2048, "text")


def trained(logs: Path, case: losses.Case, *, loss: float, steps: int) -> None:
    """Write the files of a training, as its ranks do."""
    folder = case.folder(logs)
    folder.mkdir(parents=True, exist_ok=True)
    header = {"seed": case.seed, "deepspeed_config": str(logs), "deepspeed": {"compression": {
        "ledger": {"jsonl": str(logs)}}}}  # fmt: skip
    lines: list[dict[str, Any]] = [{"run": header}]
    for step in range(1, steps + 1):
        line = {"step": step, "loss": loss + 1 / 3, "seconds": 0.123456789, "tokens": 64 * step}
        late = step > steps - 2
        lines.append({**line, "valid_losses": [loss, loss + 0.1]} if late else line)
    lines.append({"summary": True, "valid_loss": loss, "final_loss": loss})
    (folder / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
