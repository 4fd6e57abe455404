"""Let examples run on CPUs with trainers that support some features on GPUs only.

None of it concerns hybridcomp or scripts for GPUs.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch


def accelerate_on_cpu(engine: str = "") -> None:
    """Let accelerate shard and use DeepSpeed on CPUs by changing its distributed type.

    ``engine``: "fsdp", "deepspeed" or "ddp"; by default the setting of ``accelerate launch``.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    for name in ("fsdp", "deepspeed"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}") == "true":
            engine = engine or name
    if engine == "deepspeed":
        deepspeed_on_cpu()
    if not torch.cuda.is_available():
        state = PartialState(cpu=True)
        if engine == "fsdp":
            state.distributed_type = DistributedType.MULTI_GPU
        elif engine == "deepspeed":
            state.distributed_type = DistributedType.DEEPSPEED


def deepspeed_on_cpu() -> None:
    """Skip a DeepSpeed extension that builds for minutes on CPUs and is not needed to train."""
    import deepspeed.ops

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def lightning_accelerator() -> Any:
    """Return ``lightning.Trainer``'s ``accelerator``: GPUs, else CPUs posing as GPUs.

    Lightning's DeepSpeed strategy accepts a ``CUDAAccelerator`` only.
    """
    from lightning.pytorch.accelerators import CUDAAccelerator

    if torch.cuda.is_available():
        return "gpu"

    class OnCPU(CUDAAccelerator):  # type: ignore[misc]
        """Accelerator whose processes run on CPUs."""

        parse_devices = staticmethod(int)
        is_available = staticmethod(lambda: True)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            """Return a device for each process."""
            return [torch.device("cpu", place) for place in range(devices)]

        def setup_device(self, device: torch.device) -> None:
            """Choose nothing."""

        def setup(self, trainer: Any) -> None:
            """Empty nothing."""

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            """Return nothing."""
            return {}

        def teardown(self) -> None:
            """Free nothing."""

    return OnCPU()


#: functions of ``torch.cuda`` that torchtitan calls, for a process on CPUs
TORCHTITAN_DEVICE = SimpleNamespace(
    set_device=lambda _: None, synchronize=lambda: None, empty_cache=lambda: None,
    reset_peak_memory_stats=lambda: None, current_device=lambda: 0, device_count=lambda: 1,
    get_device_name=lambda _: "CPU", memory_stats=lambda _: {},
    get_device_properties=lambda _: SimpleNamespace(total_memory=1),
)  # fmt: skip


def torchtitan_devices() -> None:
    """Let torchtitan train on CPUs; call before importing anything else of it."""
    if not torch.cuda.is_available():
        from torchtitan.tools import utils

        utils.device_type, utils.device_module = "cpu", TORCHTITAN_DEVICE
