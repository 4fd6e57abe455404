"""Describe the benchmarked machine and the versions of its libraries."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu_bench.measure import cuda


def facts(device: torch.device) -> dict[str, Any]:
    """Return facts of the machine and versions of its libraries, for the report."""
    if device.type == "cuda":
        properties = cuda.get_device_properties(0)
        named = {
            "device": properties.name,
            "compute_capability": list(cuda.get_device_capability()),
            "memory_gb": properties.total_memory / 2**30,
        }
    else:
        named = {"device": "a CPU", "compute_capability": [], "memory_gb": 0.0}
    names = (
        "cupy",
        "nvidia-nccl-cu13",
        "triton",
        "deepspeed",
        "bitsandbytes",
        "nvidia-nvcomp-cu13",
    )
    return {
        **named,
        "versions": {
            "Python": platform.python_version(), "torch": torch.__version__,
            "CUDA": torch.version.cuda, **_versions(names),
        },
    }  # fmt: skip


def _versions(names: Sequence[str]) -> dict[str, str]:
    """Return versions of installed packages; the wheel of ``cupy`` has several possible names."""
    found = {}
    for name in names:
        for package in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
            try:
                found[name] = metadata.version(package)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
