"""Send weights unencoded: from one island to all islands, and between the ranks of an island."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hybridcomp.collectives.wire.transport import all_gather_single
from hybridcomp.job.gates import gate


def broadcast(values: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Broadcast ``values`` of global rank ``source`` to all ranks of ``group``, in place."""
    gate(group)
    dist.broadcast(values, source, group=group)


def start_gather(out: Tensor, values: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start an all-gather of ``values``, equally long on all ranks, into ``out`` by group rank.

    ``group`` None: all ranks of the job.
    """
    work = all_gather_single(out, values, group=group, async_op=True)
    assert work is not None
    return work
