"""Where a trainer offers something on GPUs only, what lets its example be tried out on CPUs.

None of it is about hybridcomp, and a script for GPUs needs none of it.
"""

from __future__ import annotations

import torch


def allow_fsdp() -> None:
    """Let accelerate shard on CPUs: it asks for nothing but processes that are those of GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if not torch.cuda.is_available():
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
