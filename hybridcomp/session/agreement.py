"""Check that all ranks of a job have the same block and the same software versions."""

from __future__ import annotations

from typing import Any

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.job import peer_liveness
from hybridcomp.job.agreement import agree, versions


def agree_on(block: CompressionConfig | None, *packages: str, **facts: Any) -> None:
    """Check that the block, the versions of ``packages`` and ``facts`` are equal on all ranks.

    ``block`` None: this rank has no block. Raises AgreementError, naming the ranks that differ.
    """
    if "deepspeed" not in packages:
        refuse_deepspeeds(block)
    settings = {BLOCK: None} if block is None else block.flat()
    agree({**settings, **facts, **versions(*packages)})
    peer_liveness.announce()
    peer_liveness.limit_waits()


def refuse_deepspeeds(block: CompressionConfig | None) -> None:
    """Raise ConfigError for keys of the block that have an effect only under DeepSpeed."""
    if block is not None and block.pipeline.waitless:
        todo = "only DeepSpeed's pipeline goes on without a flush; remove it"
        raise ConfigError(f"{BLOCK}.pipeline.versions", block.pipeline.versions, todo)
    if block is not None and block.memory.planned:
        todo = "only DeepSpeed's ZeRO 3 is planned (FSDP2: pass offload_policy to fully_shard)"
        raise ConfigError(f"{BLOCK}.memory.policy", block.memory.policy, f"{todo}; remove it")
