"""Check whether a DeepSpeed engine can run its pipeline without a flush."""

from __future__ import annotations

from typing import Any

from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.patches.rules.ds_pipeline import Stages, check_precision, check_stages


def check(engine: Any, settings: AsyncPipelineConfig) -> None:
    """Raise ConfigError, naming the key, for an engine that needs a flush between batches."""
    check_stages(settings, stages_of(engine))
    check_precision(
        settings,
        fp16=engine.fp16_enabled(),
        bf16=engine.bfloat16_enabled(),
        stage=engine.zero_optimization_stage(),
    )


def stages_of(engine: Any) -> Stages:
    """Return the facts of the engine's stages that the rules read."""
    module = engine.module
    return Stages(
        module.num_stages, bool(module.tied_comms), bool(module.dynamic_shape),
        module._grid.get_slice_parallel_world_size(), engine.gradient_accumulation_steps(),
    )  # fmt: skip


def is_adam(engine: Any) -> bool:
    """Return whether the optimizer is one of the Adam family."""
    return "adam" in type(engine.basic_optimizer).__name__.lower()
