"""All-to-all and all-gather over gloo as messages between pairs, receives posted first.

gloo sends a message once its receiver has told that it waits. In gloo's own collectives a rank may
begin with its data before it has told that: what it tells then queues up behind the data, and the
two directions of a link run one after the other. Between two ranks at 71 Mb/s and at 1 Gb/s that
happened to about half of all messages above 0.4 MB, which took twice as long as the link needs.
Posted before any send, what receivers tell goes out first. The bytes are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hybridcomp import presence
from hybridcomp.collectives.wire.pinned_staging import backend_of

#: of these messages, so that none is taken for a message of the training program
TAG = int.from_bytes(b"hc", "big")


#: works that nobody waited for. gloo takes a receive back when its work is freed, and the message
#: that comes for it would be taken for the next one of its sender
_forgotten: deque[list[Work]] = deque()
MOST_FORGOTTEN = 64


class Works(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them; raises what the first that failed raises."""
        works, self._works = self._works, []
        limit = presence.time_limit() if timeout is None else timeout
        for work in works:  # a receive of gloo does not know when its group's time is over
            work.wait() if limit is None else work.wait(limit)
        return True

    def __del__(self) -> None:
        if self._works:
            _forgotten.append(self._works)


def limited(work: Work, device: torch.device, group: ProcessGroup | None) -> Work:
    """``work``, which over gloo ends with the time-out of the default group."""
    return Works([work]) if suits(device, group) else work


def suits(device: torch.device, group: ProcessGroup | None) -> bool:
    """Whether tensors of ``device`` travel over gloo."""
    return device.type == "cpu" and backend_of(group, device) == "gloo"


def all_to_all(out: Sequence[Tensor], values: Sequence[Tensor], group: ProcessGroup | None) -> Work:
    """Send ``values[r]`` to group rank r, fill ``out[r]`` with what comes from there.

    Tensors of no elements do not travel; both sides know that. ``out[r]`` may be longer than what
    comes from another rank: gloo asks only that it fits.
    """
    while len(_forgotten) > MOST_FORGOTTEN:  # long there: messages of a pair come in order
        for work in _forgotten.popleft():
            work.wait()
    me, ranks = dist.get_rank(group), len(out)
    out[me].copy_(values[me])
    # everybody begins with another one, so that no rank gets all messages at once
    others = [(me + step) % ranks for step in range(1, ranks)]
    works = [_recv(out[rank], rank, group) for rank in reversed(others) if out[rank].numel()]
    works += [_send(values[rank], rank, group) for rank in others if values[rank].numel()]
    return Works(works)


def _recv(out: Tensor, rank: int, group: ProcessGroup | None) -> Work:
    work = dist.irecv(out, _global(rank, group), group=group, tag=TAG)
    assert work is not None, "this rank is not in the group"
    return work


def _send(values: Tensor, rank: int, group: ProcessGroup | None) -> Work:
    work = dist.isend(values, _global(rank, group), group=group, tag=TAG)
    assert work is not None, "this rank is not in the group"
    return work


def _global(rank: int, group: ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
