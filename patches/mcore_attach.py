"""The channels of a megatron-core job, and following its optimizer steps.

Megatron has no engine object, so there is one ``Channels`` for the process. Its block comes from
``hybridcomp.install(config)`` or from the file that ``HYBRIDCOMP_CONFIG`` names.
``initialize_model_parallel`` and not a constructor: every rank calls it, once torch.distributed is
up and before the first message. The concrete ``step`` methods and not ``MegatronOptimizer.step``,
which is abstract; they call each other, so only the outermost counts.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.agreement import agree, versions
from hybridcomp.channels import Channels
from hybridcomp.config import BLOCK, CompressionConfig, load_config, read_source
from hybridcomp.monitor import Event, Reporter
from hybridcomp.patching import Seam

REQUIREMENT = "megatron-core >= 0.13, < 0.20"
#: environment variable with the path of a block, or of a file that holds one under "compression"
ENVIRONMENT = "HYBRIDCOMP_CONFIG"
#: optimizer steps between two reports of the ledger
REPORT_EVERY = 10

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


@dataclass
class _Holder:
    """What this process has instead of an engine."""

    config: CompressionConfig | None = None
    explicit: bool = False  # configured by call: the environment is not asked
    channels: Channels | None = None
    reporter: Reporter | None = None
    settled: bool = False  # the ranks agreed, with or without a block
    stepping: bool = False  # inside an optimizer step
    chunks: int = 0  # model chunks wrapped for data parallelism so far
    said: set[str] = field(default_factory=set)


_holder = _Holder()


def configure(config: Mapping[str, Any] | str | Path | CompressionConfig | None) -> None:
    """Set the block of this process; None forgets it, and asks the environment again.

    Takes a CompressionConfig, a block, a dict or file with a block under "compression", or the path
    of any of these. Acts on the next use of megatron-core; channels that exist are dropped.
    Raises ConfigError.
    """
    global _holder
    _holder = _Holder(config=_parse(config), explicit=config is not None)


def _parse(
    config: Mapping[str, Any] | str | Path | CompressionConfig | None,
) -> CompressionConfig | None:
    if config is None or isinstance(config, CompressionConfig):
        return config
    whole = read_source(config)
    if BLOCK in whole:
        return load_config(whole)
    block = CompressionConfig.parse(whole)
    return block if block.enabled else None


def use(channels: Channels | None) -> None:
    """Take over the channels that somebody else made and agreed on (a DeepSpeed engine)."""
    global _holder
    _holder = _Holder(channels=channels, explicit=True, settled=True)


def current() -> Channels | None:
    """The channels of this process, None without a block.

    The first call after torch.distributed is up makes them: a collective through the rendezvous
    store, which every rank reaches without waiting for a message of megatron-core.
    """
    if not _holder.settled and dist.is_initialized():
        _settle()
    return _holder.channels


def configured() -> CompressionConfig | None:
    """The block of this process, by call or by environment. Raises ConfigError."""
    if not _holder.explicit and (path := os.environ.get(ENVIRONMENT)):
        _holder.config = _parse(path)
    return _holder.config


def _settle() -> None:
    _holder.settled = True
    config = configured()
    settings = {BLOCK: None} if config is None else config.flat()
    agree({**settings, **versions("megatron-core")})
    if config is None:
        return
    _holder.channels = Channels(config)
    jsonl = config.ledger.jsonl
    _holder.reporter = Reporter(_holder.channels, Path(jsonl) if jsonl else None, _device())
    for line in config.describe():
        say(line)
    if config.error_feedback("dp"):
        say("dp: Megatron's checkpoints do not hold residuals; they start at zero after a restart")


def _device() -> torch.device:
    if "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def say(text: str) -> None:
    """Print ``text`` on rank 0, once."""
    if text not in _holder.said and dist.get_rank() == 0:
        print(f"[hybridcomp] {text}", flush=True)
    _holder.said.add(text)


def next_chunk() -> int:
    """The number of the model chunk that is being wrapped."""
    _holder.chunks += 1
    return _holder.chunks - 1


def make_initialize_model_parallel(original: Callable[..., None]) -> Callable[..., None]:
    """After the groups exist, before they carry a message: make the channels."""

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        current()

    return initialize_model_parallel


def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """After the outermost step: residuals follow the loss scale, the ledger reports."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        channels = current()
        if channels is None or _holder.stepping:
            return original(self)
        feedback = any(channel.error_feedback for channel in channels)
        before = float(self.get_loss_scale()) if feedback else 1.0
        _holder.stepping = True
        try:
            result = original(self)
        finally:
            _holder.stepping = False
        channels.step += 1
        if feedback:
            _follow(channels, bool(result[0]), before, float(self.get_loss_scale()))
        if channels.step % REPORT_EVERY == 0:
            _report(channels.step)
        return result

    return step


def _follow(channels: Channels, success: bool, before: float, after: float) -> None:
    """Residuals are in units of the scaled loss; those of a skipped step belong to no step."""
    if not success:
        channels.residuals.drop()
    elif after != before:
        channels.residuals.scale(after / before)


def _report(step: int) -> None:
    if _holder.reporter is None:
        return  # the engine that lent the channels reports
    events: list[list[Event]] = [_holder.reporter.report(step)]
    # the reader of rank 0 prints; Megatron's W&B run lives on the last rank
    dist.broadcast_object_list(events, src=0)
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        # without a step: Megatron numbers its own records by iteration, which a restart continues
        wandb.log(dict(events[0]), commit=False)


PATCHES = (
    (INITIALIZE, make_initialize_model_parallel),
    *((seam, make_step) for seam in STEPS),
)
