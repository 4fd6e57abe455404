"""Run work on the first rank while the others wait, watching for lost peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hybridcomp.job import saved, small_messages
from hybridcomp.job.agreement import tell

T = TypeVar("T")
#: called by the work at intervals, so that the waiting ranks do not time out
Beat = Callable[[], object]


def on_first(work: Callable[[Beat], T], what: str) -> T:
    """Return on every rank what ``work`` returns on rank 0; every rank calls this.

    Raises CheckpointError on every rank if ``work`` fails, PeerError if a rank is gone.
    """
    result, problem = None, None
    if dist.get_rank() == 0:
        result, problem = saved.attempt(lambda: work(lambda: tell({"busy": True}, what=what)))
        tell({"busy": False}, what=what)
    else:
        while tell({"busy": False}, what=what)[0]["busy"]:
            pass
    saved.all_well(problem, what)
    found: T = small_messages.from_first(result)  # type: ignore[assignment]
    return found
