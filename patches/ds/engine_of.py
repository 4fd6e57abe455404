"""Build a DeepSpeed engine in a process that DeepSpeed's launcher did not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def engine_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> Any:
    """Call ``deepspeed.initialize`` on the existing default process group; return the engine.

    ``settings``: the ds_config. On a CPU it compiles no kernels.
    """
    import deepspeed

    if not torch.cuda.is_available():
        # otherwise DeepSpeed compiles kernels for shared memory, which takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(settings))
    return engine
