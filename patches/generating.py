"""Find the stage with which a rank of an engine generates."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation import GeneratingStage
from hybridcomp.job import error_exit
from hybridcomp.patches.common.engine_packages import is_megatron, packages_of

#: name of the operation, and of the block's key, in messages
KEY = "generate"


def stage_of(engine: Any) -> GeneratingStage:
    """Return this rank's stage of an engine. Raises ConfigError where it has none."""
    error_exit.install()
    if not dist.is_initialized():
        raise ConfigError(KEY, NOTHING, "torch.distributed is not up; generate from a built engine")
    if is_megatron(engine):
        todo = (
            "megatron-core generates by its own DynamicInferenceEngine, with weights from "
            "swap_model_weights of its resharding; hybridcomp.publish feeds vLLM and SGLang"
        )
        raise ConfigError(KEY, Shown("megatron-core"), todo)
    if "deepspeed" not in packages_of(engine):
        todo = "expected an engine of DeepSpeed; under FSDP2 and DDP use hybridcomp.gathered(model)"
        raise ConfigError(KEY, Shown(type(engine).__name__), todo)
    from hybridcomp.patches.ds.generation import stage_of as of_deepspeed

    return of_deepspeed(engine)
