"""Run GPT-NeoX on a CPU over gloo, for tests and for trying out; upstream has no CPU path.

Call ``install()`` before ``import megatron``, ``patch()`` after. Each stand-in names the file that
needs it (GPT-NeoX main of May 2026). No collective is replaced here. Configurations need
``"distributed_backend": "gloo"``, ``"global_num_gpus": N``, no fused kernels, fp32 or bfloat16,
and with a pipeline ``"eval_iters": 0`` (evaluation of pipelines is broken upstream).
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch


def install() -> None:
    """Replace functions of torch and DeepSpeed by stand-ins. Does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.device_count = lambda: ranks  # initialize.py, which sets mpu up only if this says so
    cuda.set_device = lambda *args, **kwargs: None  # initialize.py
    cuda.current_device = lambda: cpu  # mpu/layers.py, mpu/mappings.py, utils.py
    cuda.synchronize = lambda *args, **kwargs: None  # the timers of utils.py
    cuda.LongTensor = torch.LongTensor  # mpu/data.py, data_utils.py, gpt2_dataset.py
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # checkpointing.py
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self  # mpu/data.py, positional_embeddings.py
    _compile_nothing()


def _compile_nothing() -> None:
    """Keep DeepSpeed from building kernels for minutes, which a CPU does not need."""
    import deepspeed.ops
    import deepspeed.ops.adam

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.ops.adam.FusedAdam = _adam  # training.py imports it where apex is missing


def _adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW, which decays weights as FusedAdam does; DeepSpeed supports this exact type."""
    return torch.optim.AdamW(parameters, **settings)


def patch() -> None:
    """Let ``initialize_megatron`` start without CUDA, as upstream's data processing does."""
    if torch.cuda.is_available():
        return
    training: Any = importlib.import_module("megatron.training")
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
