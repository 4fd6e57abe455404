"""Check whether an engine of DeepSpeed can run its pipeline without a flush."""

from __future__ import annotations

from typing import Any

from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_pipeline import KEY, check_precision


def check(engine: Any, settings: AsyncPipelineConfig) -> None:
    """Raise ConfigError for an engine that cannot go on without a flush, naming the key."""
    module, found = engine.module, None
    if module.num_stages < 2:
        found, todo = "one stage", "there is no pipeline; remove it"
    elif module.tied_comms:
        found, todo = "tied layers", "their stages wait for each other in every step; untie them"
    elif module.dynamic_shape:
        found, todo = "dynamic_shape", "messages are received ahead; make shapes equal"
    elif module._grid.get_slice_parallel_world_size() > 1:
        found, todo = "tensor parallel stages", "its messages are not posted; use one rank a stage"
    if found is not None:
        raise ConfigError(KEY, Shown(found), f"{todo}, or set pipeline.versions to flush")
    check_precision(
        settings,
        fp16=engine.fp16_enabled(),
        bf16=engine.bfloat16_enabled(),
        stage=engine.zero_optimization_stage(),
    )
    check_micro_batches(engine, settings)


def check_micro_batches(engine: Any, settings: AsyncPipelineConfig) -> None:
    """Raise ConfigError where two versions are not enough for the stages."""
    stages, micro_batches = engine.module.num_stages, engine.gradient_accumulation_steps()
    least = (stages - 1) * (1 + settings.slack)
    if settings.versions == 2 and micro_batches < least:
        todo = f'{stages} stages need gradient_accumulation_steps of at least {least}, or "stash"'
        raise ConfigError(KEY, Shown(f"2 with {micro_batches} micro-batches"), todo)


def is_adam(engine: Any) -> bool:
    """Return whether the optimizer is one of the Adam family."""
    return "adam" in type(engine.basic_optimizer).__name__.lower()
