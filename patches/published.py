"""Implement ``hybridcomp.publish``: find the engine's adapter and the destination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.publishing import EngineWeights, Publisher
from hybridcomp.publishing.destinations import Destination, Folder, folder_of
from hybridcomp.publishing.groups import GroupDestination
from hybridcomp.publishing.streams import Stream


def publish(
    engine: Any, to: Any, *, every: int = 1, anchor_every: int = 100, dtype: str | None = None
) -> Publisher:
    """See ``hybridcomp.publish``."""
    weights = weights_of(engine)
    destination = destination_of(to, weights)
    return Publisher(weights, destination, every=every, anchor_every=anchor_every, dtype=dtype)


def weights_of(engine: Any) -> EngineWeights:
    """Return what this rank holds of an engine's weights. Raises ConfigError."""
    kinds = {cls.__module__.partition(".")[0] for cls in type(engine).__mro__}
    if "deepspeed" in kinds:
        from hybridcomp.patches.ds import weights as of_deepspeed

        return of_deepspeed.weights_of(engine)
    from hybridcomp.patches.torch import weights as of_torch

    if of_torch.is_engine(engine):
        return of_torch.weights_of(engine)
    todo = (
        "expected an engine of DeepSpeed, the DistributedDataParallel of torch or megatron-core (a "
        "list of them with virtual pipeline stages), or the root of fully_shard"
    )
    raise ConfigError("publish.engine", Shown(type(engine).__name__), todo)


def destination_of(to: Any, weights: EngineWeights) -> Destination:
    """Return the destination that ``to`` names. Raises ConfigError."""
    if isinstance(to, (str, Path)):
        return Folder(folder_of(to))
    first = weights.ranks[0] == dist.get_rank()
    if isinstance(to, dist.ProcessGroup):
        return _of_group(to, weights) if first else Stream(None, weights.ranks)
    if not first and to in (None, dist.GroupMember.NON_GROUP_MEMBER):
        return Stream(None, weights.ranks)
    if callable(getattr(to, "write", None)):
        return Stream(to, weights.ranks)
    todo = "expected a folder (file:///...), a stream with write(), or a process group"
    raise ConfigError("publish.to", Shown(type(to).__name__), todo)


def _of_group(group: dist.ProcessGroup, weights: EngineWeights) -> Destination:
    """Return ``group`` as destination. Raises ConfigError where other ranks of the job are in it.

    Members other than the first rank of the job receive; one that sends as well would wait for
    itself.
    """
    both = sorted(set(dist.get_process_group_ranks(group)) & set(weights.ranks[1:]))
    if both:
        todo = "of the job only its first rank may be in the group, beside the receivers"
        raise ConfigError("publish.to", Shown(f"a group with rank(s) {both[:8]} of the job"), todo)
    return GroupDestination(group, weights.ranks)
