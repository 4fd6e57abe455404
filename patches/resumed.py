"""Implement ``hybridcomp.resume``: find the engine's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridcomp.channels import channels_of
from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.elastic.checkpoints import ResumedJob
from hybridcomp.errors import ConfigError
from hybridcomp.job import error_exit
from hybridcomp.log import say
from hybridcomp.patches.common.engine_packages import ENGINES, is_megatron, packages_of
from hybridcomp.patches.common.first_rank import on_first
from hybridcomp.patches.common.resumed_parts import KEY, WHAT

if TYPE_CHECKING:
    from hybridcomp.elastic.sampler import ElasticSampler


def resume(
    engine: Any,
    folder: str | Path,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    sampler: ElasticSampler | None = None,
    lr: str | None = None,
) -> ResumedJob:
    """Resume from the newest whole checkpoint in a folder, on any number of ranks.

    Every rank calls it, once, before the first step. It restores weights, optimizer states and step
    exactly, and also the sum of residuals over the ranks, the frozen parameters, and the verdicts
    of guard and ``"when": "auto"``. It first converts DeepSpeed's checkpoints at ZeRO 1 to 3 if the
    number of replicas or pipeline stages differs. It skips incomplete checkpoints, with a message;
    without a complete one the job begins at step 0.

    Args:
        engine: an engine of DeepSpeed, a model under torch's or Megatron's DistributedDataParallel
            (a list of them with virtual pipeline stages), or the root of fully_shard.
        folder: the folder where the job saves its checkpoints, each in a subfolder whose name ends
            in a number; or one of these subfolders.
        optimizer, scheduler: the model's; omitted for DeepSpeed, whose engine has them.
        sampler: the job's sampler, which continues at the first sample that was not trained on.
        lr: how to scale the learning rate if the number of samples per step has changed: by the
            ratio of new to old ("linear"), by its square root ("sqrt"), or not at all ("keep").

    Raises, on every rank and before anything changes: ConfigError if this job cannot continue from
    the checkpoint, CheckpointError if no checkpoint is whole or it belongs to another model.
    """
    error_exit.install()
    if not dist.is_initialized():
        todo = "torch.distributed is not up; call resume after the engine was built"
        raise ConfigError(KEY, NOTHING, todo)
    place = Path(folder)
    adapter, inner = _adapter(engine)
    adapter.check(inner, optimizer, scheduler)
    job, skipped = on_first(lambda beat: adapter.find(place), WHAT)
    say(*(f"resume: skipped {text}" for text in skipped))
    found = ResumedJob()
    if job is not None:
        found = adapter.resume(inner, job, optimizer, scheduler, sampler, lr)
    say(_told(found, place))
    _freeze_again(engine)
    return found


def _adapter(engine: Any) -> tuple[Any, Any]:
    """Return the module that loads checkpoints of this kind of engine, and what it loads into."""
    if "deepspeed" in packages_of(engine):
        from hybridcomp.patches.ds.checkpoint import replanned as of_deepspeed

        return of_deepspeed, engine
    if is_megatron(engine):
        from hybridcomp.patches.mcore import replanned as of_megatron

        return of_megatron, engine
    from hybridcomp.patches.torch import replanned as of_torch
    from hybridcomp.patches.torch import weights
    from hybridcomp.patches.torch.attach import unwrapped

    model = unwrapped(engine)
    if not weights.is_engine(model):
        raise ConfigError(KEY, Shown(type(engine).__name__), ENGINES)
    return of_torch, model


def _freeze_again(engine: Any) -> None:
    """Freeze the parameters that were frozen in the loaded checkpoint."""
    from hybridcomp.patches.torch.attach import channels_of_model

    channels = channels_of(engine) or channels_of_model(engine)
    if channels is not None and channels.to_freeze:
        from hybridcomp.patches import frozen

        state, channels.to_freeze = channels.to_freeze, {}
        frozen.restore(engine, state)


def _told(found: ResumedJob, place: Path) -> str:
    if found.folder is None:
        return f"resume: {place} has no checkpoint; the job begins at step 0"
    ranks = "" if found.ranks is None else f", saved by {found.ranks} ranks"
    seen = "" if found.samples_seen is None else f", after {found.samples_seen} samples"
    lr = "" if found.lr_factor == 1 else f"; the learning rate is times {found.lr_factor:g}"
    return (
        f"resume: {found.folder}{ranks}: {dist.get_world_size()} go on from step "
        f"{found.step}{seen}{lr}"
    )
