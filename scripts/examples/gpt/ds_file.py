"""Read AdamW, bf16 and the schedule from a DeepSpeed file for trainers without DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class SettingsError(ValueError):
    """A DeepSpeed file has a setting that the trainer does not support."""


def adam_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return AdamW's arguments. Raises SettingsError for other optimizers or unsupported keys."""
    optimizer = settings.get("optimizer", {})
    if optimizer.get("type") != "AdamW":
        raise SettingsError(
            f"optimizer.type: expected AdamW, found {optimizer.get('type')!r}; without DeepSpeed "
            "only AdamW is followed"
        )
    given = {key: v for key, v in optimizer.get("params", {}).items() if key != "torch_adam"}
    unknown = sorted(given.keys() - {"lr", "betas", "eps", "weight_decay", "fused"})
    if unknown:
        raise SettingsError(
            f"optimizer.params.{unknown[0]}: not known without DeepSpeed; leave it out"
        )
    # DeepSpeed's defaults, which differ from torch's
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **given}
    return {**adam, "betas": tuple(adam["betas"])}


def scheduler_of(settings: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's schedule, None if unset. Raises SettingsError for an unknown one."""
    if "scheduler" not in settings:
        return None
    from deepspeed.runtime import lr_schedules

    kind = settings["scheduler"]["type"]
    if kind not in lr_schedules.VALID_LR_SCHEDULES:
        raise SettingsError(f"scheduler.type: found {kind!r}, which DeepSpeed does not know")
    return getattr(lr_schedules, kind)(optimizer, **settings["scheduler"].get("params", {}))


def has_bf16(settings: dict[str, Any]) -> bool:
    """Return whether bf16 is on. Raises SettingsError for fp16, which needs a loss scaler."""
    if settings.get("fp16", {}).get("enabled"):
        raise SettingsError("fp16.enabled: found True; torch's engines train here in bf16 or fp32")
    return bool(settings.get("bf16", {}).get("enabled"))


def report_beside(settings: dict[str, Any], log: Path | None) -> None:
    """Make the block's ledger write to ``log``'s folder, where ``hybridcomp compare`` looks.

    Changes the block in ``settings`` unless the block sets a file or null.
    """
    block = settings.get("compression")
    if log is not None and isinstance(block, dict) and block:
        ledger = block.setdefault("ledger", {})
        if isinstance(ledger, dict):
            ledger.setdefault("jsonl", str(log.parent / "ledger.jsonl"))
