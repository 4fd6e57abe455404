"""Return a device's name for reports, and the device of a process group's messages."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

cuda: Any = torch.cuda  # parts of torch.cuda are untyped
CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with torch's number of threads."""
    if device.type == "cuda":
        return str(cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    if CPU_INFO.is_file():
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def default_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors ``group``, by default all ranks, sends and reduces."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
