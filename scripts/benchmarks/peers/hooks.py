"""torch's DDP communication hooks, and a bf16 hook that works over gloo."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

#: torch's hooks run one chain of all-reduces per bucket; gloo mixes up several chains and aborts
ONE_BUCKET_MB = 100_000


def fp16(model: DistributedDataParallel) -> None:
    """Register torch's ``fp16_compress_hook``."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def bf16(model: DistributedDataParallel) -> None:
    """Register a copy of ``bf16_compress_hook``; torch's rejects gloo ("required NCCL 2.10+")."""

    def hook(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        short = (gradients / dist.get_world_size()).to(torch.bfloat16)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        dist.all_reduce(short)
        done.set_result(gradients.copy_(short))
        return done

    hook.__annotations__.clear()  # strings in this file, which torch rejects
    model.register_comm_hook(None, hook)


def power_sgd(model: DistributedDataParallel, rank: int, start: int) -> Any:
    """Register torch's ``powerSGD_hook`` (arXiv 1905.13727) as documented; return its state.

    Error feedback and warm start are on; iterations before ``start`` are native: "typically the
    first 10% of steps", but at least two, since DDP rebuilds its buckets after the first.
    """
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=max(2, start),
        use_error_feedback=True,
        warm_start=True,
        compression_stats_logging_frequency=10**9,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return state


def start_iteration(steps: int) -> int:
    """Return a tenth of the run's steps."""
    return max(2, math.ceil(0.1 * steps))
