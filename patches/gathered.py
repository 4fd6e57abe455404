"""Implement ``hybridcomp.gathered``: find the engine's adapter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.engine_packages import packages_of
from hybridcomp.patches.torch.attach import unwrapped

WHAT = "hybridcomp.gathered"
MEGATRON = (
    "Megatron samples from its ranks itself (megatron.core.inference.engines.dynamic_engine."
    "DynamicInferenceEngine, with megatron.core.resharding.refit.swap_model_weights); "
    "hybridcomp.publish sends its weights to vLLM and SGLang"
)


def gathered(engine: Any) -> AbstractContextManager[nn.Module]:
    """Implement ``hybridcomp.gathered``. Raises ConfigError on an engine without shards."""
    engine = unwrapped(engine)
    first = engine[0] if isinstance(engine, (list, tuple)) and engine else engine
    kinds = packages_of(first)
    if "deepspeed" in kinds:
        from hybridcomp.patches.ds import gathered as of_deepspeed

        return of_deepspeed.gathered(engine)
    if "megatron" in kinds:
        raise ConfigError(WHAT, Shown(f"megatron-core's {type(first).__name__}"), MEGATRON)
    from hybridcomp.patches.torch import gathered as of_torch
    from hybridcomp.patches.torch import weights

    if weights.is_engine(engine):
        return of_torch.gathered(engine)
    todo = "expected an engine of DeepSpeed, the root of fully_shard or a DistributedDataParallel"
    raise ConfigError(WHAT, Shown(type(engine).__name__), todo)
