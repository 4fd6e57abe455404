"""Limit the memory of trials and comparisons, equally on all ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hybridcomp.job import small_messages

#: maximum bytes per value in a trial: the value, two residuals, a sum, a payload
NBYTES = 24


def room_for(device: torch.device) -> int:
    """Return the maximum number of trial values: half of the free memory, least of all ranks.

    A collective over the job.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.get_world_size()
    values = torch.tensor(max(1, free // 2 // NBYTES), device=device)
    return int(small_messages.least(values))


def has_room(nbytes: int, device: torch.device) -> bool:
    """Return whether every rank's GPU has ``nbytes`` free; a collective over the job.

    Host memory is not checked, since hosts can swap.
    """
    fits = True
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        fits = nbytes < torch.cuda.mem_get_info(device)[0] + kept
    return bool(small_messages.least(torch.tensor(int(fits), device=device)))
