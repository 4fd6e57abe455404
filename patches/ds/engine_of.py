"""An engine of DeepSpeed's around a model, for a process that no launcher of DeepSpeed started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def engine_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> Any:
    """``deepspeed.initialize`` on the default process group, which exists.

    ``settings``: of the ds_config. Nothing is compiled for it.
    """
    import deepspeed

    if not torch.cuda.is_available():
        # else DeepSpeed compiles kernels for shared memory, which takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(settings))
    return engine
