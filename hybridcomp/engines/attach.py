"""``hybridcomp.attach`` and ``hybridcomp.stateful``: which engine a model is under."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridcomp import process
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.engines.attached import Attached
from hybridcomp.engines.session import Source
from hybridcomp.engines.stateful import AtCheckpoint
from hybridcomp.errors import ConfigError

#: attribute of a model: its Attached, None where it was looked at and there is no block
ATTRIBUTE = "_hybridcomp_attached"
_UNSEEN = object()


def attach(model: nn.Module, source: Source | None = None) -> Attached | None:
    """See ``hybridcomp.attach``."""
    known: Any = vars(model).get(ATTRIBUTE, _UNSEEN)
    if known is not _UNSEEN and (source is None or known is not None):
        if source is not None:
            todo = "this model is attached already; call attach once, before its first forward pass"
            raise ConfigError(BLOCK, Shown("a second block"), todo)
        found: Attached | None = known
        return found
    if not dist.is_initialized():
        todo = "torch.distributed is not up; call attach after init_process_group"
        raise ConfigError(BLOCK, NOTHING, todo)
    attached = _attach(model, source)
    if attached is not None and attached.channels["cp"].active:
        process.lend(model, attached.session)  # attention over ranks knows no engine
    object.__setattr__(model, ATTRIBUTE, attached)
    return attached


def _attach(model: nn.Module, source: Source | None) -> Attached | None:
    from hybridcomp.engines import ddp, fsdp2

    if isinstance(model, DistributedDataParallel):
        return ddp.attach(model, source)
    if fsdp2.is_sharded(model):
        return fsdp2.attach(model, source)
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        todo = "FSDP1 has no slots for communication; shard with torch's fully_shard (FSDP2)"
        raise ConfigError(BLOCK, Shown("FullyShardedDataParallel (FSDP1)"), todo)
    todo = (
        "expected a model under fully_shard or DistributedDataParallel; call attach after one of "
        "them. DeepSpeed and Megatron take hybridcomp.install"
    )
    raise ConfigError(BLOCK, Shown(type(model).__name__), todo)


def stateful(model: nn.Module, checkpoint: str | Path | None = None) -> Any:
    """See ``hybridcomp.stateful``."""
    attached = attach(model)
    if attached is None:
        todo = "there is no block, and so no state; leave it out of the checkpoint"
        raise ConfigError(BLOCK, NOTHING, todo)
    return attached if checkpoint is None else AtCheckpoint(attached, checkpoint)


def rows() -> Iterable[tuple[str, str, str]]:
    """Rows of the support matrix: dimension, what of it, which versions."""
    from hybridcomp.engines import ddp, fsdp2

    for module in (ddp, fsdp2):
        what = (module.__doc__ or "").partition(", dimension")[0]
        for name in module.COVERS:
            yield name, " ".join(what.split()), module.REQUIREMENT
