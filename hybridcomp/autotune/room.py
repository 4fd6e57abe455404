"""How much memory trials and comparisons may take; the same on all ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

#: bytes that a value takes in a trial at most: itself, two residuals, a sum, what is sent
NBYTES = 24


def room_for(device: torch.device) -> int:
    """Values that trials on ``device`` may have: half of what is free there, for all ranks alike.

    A collective over the job.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.get_world_size()
    values = torch.tensor(max(1, free // 2 // NBYTES), device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MIN)
    return int(values)


def has_room(nbytes: int, device: torch.device) -> bool:
    """Whether every rank's GPU has so many bytes to spare; a collective over the job.

    Hosts take memory from others when they have none, and are not asked.
    """
    fits = True
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        fits = nbytes < torch.cuda.mem_get_info(device)[0] + kept
    found = torch.tensor(int(fits), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)
