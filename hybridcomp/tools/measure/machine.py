"""Read a rank's memory and versions, which show whether a measurement is of another cluster."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.job.agreement import versions
from hybridcomp.tools.measure.team import Team

cuda: Any = torch.cuda  # untyped in part


def memory_nbytes(device: torch.device, ranks_on_node: int) -> int:
    """Return the bytes of a rank's GPU, or its share of the host's memory; 0 if unknown."""
    if device.type == "cuda":
        return int(cuda.get_device_properties(device).total_memory)
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    return whole // ranks_on_node


def made(team: Team, seconds: float, dtype: str) -> dict[str, str]:
    """Return versions and circumstances of a measurement, for the file."""
    found = {name: str(version) for name, version in versions().items() if version is not None}
    found["backend"] = dist.get_backend()
    found["nodes known by"] = team.nodes.source
    found["seconds"] = f"{seconds:.1f}"
    found["dtype of messages"] = dtype
    if team.device.type == "cuda":
        found["rocm" if torch.version.hip else "cuda"] = torch.version.hip or str(
            torch.version.cuda
        )
        found["nccl"] = ".".join(map(str, cuda.nccl.version()))
    return found
