"""Check that the block can act with the rest of a ds_config, before an engine is built.

No module here imports DeepSpeed, so a file can be checked on a machine without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import Shown, idle
from hybridcomp.dimensions import DEEPSPEED, Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import ds, ds_memory, ds_offload, ds_pipeline, engine
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.ds_pipeline import Stages
from hybridcomp.patches.rules.engine import Rule, hold
from hybridcomp.patches.rules.neox import RULES as NEOX_RULES

_KNOWN = (*ds.RULES, *ds_offload.RULES)
#: rules of all dimensions
TABLES = (*_KNOWN, *engine.without_seam(DEEPSPEED, _KNOWN))


def check(
    block: CompressionConfig,
    ds_config: Mapping[str, Any],
    *,
    neox: Mapping[str, Any] | None = None,
    stages: Stages | None = None,
    **facts: Any,
) -> list[str]:
    """Return sentences about keys of ``block`` that act differently than a user may expect.

    ``neox``: the settings of a GPT-NeoX job. ``stages``: the stages of a pipeline. ``facts``:
    fields of ``DeepSpeedJob`` that the ds_config lacks; None and missing fields are unknown. Raises
    ConfigError for the first dimension that cannot act, unless the block says ``"on_unsupported":
    "native"``; then the sentences say what stays native and why.
    """
    job = DeepSpeedJob(ds_config, **facts)
    _hold_to_ranks(job)
    ds_pipeline.check(block.pipeline, job, stages)
    ds_memory.check(block.memory, job)
    rules: list[tuple[Rule[Any], Any]] = [(rule, job) for rule in TABLES]
    if neox is not None:
        rules += [(rule, neox) for rule in NEOX_RULES]
    return [*_idle_keys(block, job), *hold(block, rules)]


def _idle_keys(block: CompressionConfig, job: DeepSpeedJob) -> list[str]:
    """Return sentences on keys that cannot act in this job, or that duplicate DeepSpeed's."""
    found = []
    if block.pp.scatter_gather:
        todo = (
            "DeepSpeed cuts pipeline messages among tensor-parallel ranks itself "
            "(pipeline.pipe_partitioned and pipeline.grad_partitioned); remove it"
        )
        found.append(idle(f"{BLOCK}.pp.scatter_gather", True, todo, block.on_unsupported))
    if job.pipeline is True:
        found += engine.ungathered(block, "stages of a pipeline are not gathered")
    elif job.stage < 3:
        found += engine.ungathered(block, "every rank has all weights below ZeRO stage 3")
    elif job.zero("offload_param.device") == "nvme":
        found += engine.ungathered(block, "weights on a disk (offload_param) are not gathered")
    elif job.zero("mics_shard_size") > 0:
        found += engine.ungathered(block, "weights that MiCS cuts are not gathered")
    if block.generate is not None and job.pipeline is False and not job.slices:
        shown = Shown("a model that is no PipelineModule")
        found.append(engine.no_generation(block, shown))
    return found


def _hold_to_ranks(job: DeepSpeedJob) -> None:
    """Raise ConfigError if a group size in the ds_config does not divide the number of ranks."""
    for key, size in (
        ("tensor_parallel.autotp_size", job.tensor_parallel),
        ("sequence_parallel_size", job.sequence_parallel),
    ):
        if job.world_size is not None and job.world_size % size:
            todo = f"it does not divide the {job.world_size} ranks of the job"
            raise ConfigError(key, size, todo)


def absent(ds_config: Mapping[str, Any], **facts: Any) -> frozenset[Dimension]:
    """Return the dimensions without traffic in such a job; ``facts`` as in ``check``."""
    job = DeepSpeedJob(ds_config, **facts)
    return engine.absent((rule, job) for rule in TABLES)
