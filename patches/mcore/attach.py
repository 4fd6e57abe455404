"""When the channels of a megatron-core job are made, and following its optimizer steps.

Megatron has no engine object: it uses the channels of the process (``process``).
``load_state_dict`` only to notice a restart: what we keep beside a checkpoint is in ``state``.
``initialize_model_parallel`` and not a constructor: every rank calls it, once torch.distributed is
up and before the first message. The concrete ``step`` methods and not ``MegatronOptimizer.step``,
which is abstract; they call each other, so only the outermost counts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridcomp import process
from hybridcomp.channels import Channels
from hybridcomp.patches.mcore import groups
from hybridcomp.patching import Seam

REQUIREMENT = "megatron-core >= 0.13, < 0.20"

#: nothing of its signature is used: the arguments differ in every release and are handed on
INITIALIZE = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.parallel_state",
    qualname="initialize_model_parallel",
    parameters=None,
)
STEPS = tuple(
    Seam(
        requirement=REQUIREMENT,
        module="megatron.core.optimizer.optimizer",
        qualname=f"{name}.step",
        parameters=("self",),
    )
    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
)
LOADS = tuple(
    Seam(
        requirement=REQUIREMENT,
        module=f"megatron.core.optimizer.{module}",
        qualname=f"{name}.load_state_dict",
        parameters=("self", "state_dict"),
    )
    for module, name in (
        ("optimizer", "Float16OptimizerWithFloat16Params"),
        ("optimizer", "FP32Optimizer"),
        ("optimizer", "ChainedOptimizer"),
        ("distrib_optimizer", "DistributedOptimizer"),
    )
)
LACKS_STATE = (
    "WARNING: Megatron's optimizer was restored from a checkpoint, and hybridcomp was not: steps "
    "count from zero and error feedback has forgotten what was left out; call "
    "hybridcomp.save_state(folder) where Megatron saves, hybridcomp.load_state(folder) where it "
    "loads"
)


@dataclass
class _Progress:
    """Where this process is in its optimizer steps."""

    stepping: bool = False  # inside the outermost one


_progress = _Progress()


def make_initialize_model_parallel(original: Callable[..., None]) -> Callable[..., None]:
    """After the groups exist, before they carry a message: make the channels."""

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        channels = process.current()
        if channels is not None and process.borrowed() is None:
            for note in channels.place(groups.data_parallel()):
                process.say(note)
            # gradients are fp32 or bf16, which is not known yet: what pays for bf16 does for fp32
            group = groups.replicas()
            for note in channels.weigh(group, torch.bfloat16, process.device()):
                process.say(note)

    return initialize_model_parallel


def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """After the outermost step: residuals follow the loss scale, the ledger reports."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        channels = process.current()
        if channels is None or process.borrowed() is not None or _progress.stepping:
            return original(self)
        feedback = any(channel.error_feedback for channel in channels)
        before = float(self.get_loss_scale()) if feedback else 1.0
        sampled = channels.sampling
        if process.lacks_state() and (feedback or channels.config.start_step):
            process.say(LACKS_STATE)
        _progress.stepping = True
        try:
            result = original(self)
        finally:
            _progress.stepping = False
        channels.step += 1
        if feedback:
            after = float(self.get_loss_scale())
            _follow(channels, bool(result[0]), before, after)
            process.note_loss_scale(after)
        for text in channels.close_step(sampled, process.device()):
            process.say(f"{text}; only hybridcomp.save_state keeps this over a restart")
        if channels.step % channels.config.ledger.interval == 0:
            _report(channels.step)
        return result

    return step


def make_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remember that a checkpoint was loaded: what we keep beside it has to be, too."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        process.note_restored()
        return original(self, state_dict)

    return load_state_dict


def _follow(channels: Channels, success: bool, before: float, after: float) -> None:
    """Residuals are in units of the scaled loss; those of a skipped step belong to no step."""
    if not success:
        channels.residuals.drop()
    elif after != before:
        channels.residuals.scale(after / before)


def _report(step: int) -> None:
    reporter = process.reporter()
    if reporter is None:
        return  # whoever handed the channels over reports
    events = reporter.report(step)
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        # Megatron's run is on the last rank. Without a step: Megatron numbers its own records by
        # iteration, which a restart continues
        wandb.log(dict(events), commit=False)


PATCHES = (
    (INITIALIZE, make_initialize_model_parallel),
    *((seam, make_step) for seam in STEPS),
    *((seam, make_load_state_dict) for seam in LOADS),
)
