"""Tensor-parallel layers of this process that a seam reaches. No seam is in here."""

from __future__ import annotations

import importlib
import sys

from hybridcomp.patches.mcore.groups import sizes
from hybridcomp.patches.neox.checkout import is_neox


def reached() -> int:
    """Ranks in the tensor-parallel groups of GPT-NeoX or megatron-core; 1 where there are none.

    DeepSpeed does not know of them: with a pipeline GPT-NeoX does not even hand over its ``mpu``.
    """
    if "megatron.mpu" in sys.modules and is_neox():
        mpu = importlib.import_module("megatron.mpu")
        if mpu.model_parallel_is_initialized():
            return int(mpu.get_model_parallel_world_size())
    if "megatron.core.parallel_state" in sys.modules:
        return sizes().get("tp", 1)
    return 1
