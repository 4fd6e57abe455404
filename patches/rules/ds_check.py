"""Check that the block can act beside the rest of a ds_config, before an engine is built.

No module here imports DeepSpeed, so a file can be checked on a machine without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import idle
from hybridcomp.dimensions import DEEPSPEED, Dimension
from hybridcomp.patches.rules import ds, ds_offload, ds_pipeline, engine
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.engine import hold
from hybridcomp.patches.rules.neox import RULES as NEOX_RULES

_KNOWN = (*ds.RULES, *ds_offload.RULES)
#: rules of all dimensions
TABLES = (*_KNOWN, *engine.without_seam(DEEPSPEED, _KNOWN))


def check(
    block: CompressionConfig,
    ds_config: Mapping[str, Any],
    *,
    pipeline: bool | None = None,
    moe: bool | None = None,
    world_size: int | None = None,
    tensor: bool | None = None,
    sequence: bool | None = None,
    replicas: int | None = None,
    mesh: bool | None = None,
    slices: bool | None = None,
    neox: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return sentences about keys of ``block`` that act differently than a user may think.

    ``pipeline``, ``moe``: whether the model is a PipelineModule, and has MoE layers;
    ``world_size``: ranks of the job; ``tensor``, ``sequence``: whether layers or the sequence are
    split over ranks already (the splits of AutoTP are read from ``ds_config``); ``replicas``:
    copies of the model; ``mesh``: whether it has layers of hybridcomp.nn.tp2d; ``slices``: whether
    it is a stage of hybridcomp.nn.slices; ``neox``: the settings of a GPT-NeoX job. None: not
    known. Raises ConfigError for the first dimension that cannot act, unless the block says
    ``"on_unsupported": "native"``; then the sentences say what stays native and why.
    """
    job = DeepSpeedJob(
        ds_config, pipeline, moe, world_size, tensor, sequence, replicas, mesh, slices
    )
    ds_pipeline.check(block.pipeline, job)
    rules = [(rule, job) for rule in TABLES]
    if neox is not None:
        rules += [(rule, DeepSpeedJob(neox)) for rule in NEOX_RULES]
    return [*_idle_keys(block), *hold(block, rules)]


def _idle_keys(block: CompressionConfig) -> list[str]:
    """Find keys for megatron-core whose work DeepSpeed does by its own settings."""
    found = []
    if block.pp.scatter_gather:
        todo = (
            "DeepSpeed cuts pipeline messages among tensor-parallel ranks itself "
            "(pipeline.pipe_partitioned and pipeline.grad_partitioned); remove it"
        )
        found.append(idle(f"{BLOCK}.pp.scatter_gather", True, todo, block.on_unsupported))
    return found


def absent(
    ds_config: Mapping[str, Any],
    *,
    pipeline: bool,
    moe: bool,
    world_size: int,
    tensor: bool,
    sequence: bool,
    replicas: int | None,
    mesh: bool = False,
    slices: bool = False,
) -> frozenset[Dimension]:
    """Return the dimensions of which such a job has no traffic."""
    job = DeepSpeedJob(
        ds_config, pipeline, moe, world_size, tensor, sequence, replicas, mesh, slices
    )
    return engine.absent((rule, job) for rule in TABLES)
