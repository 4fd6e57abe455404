"""Start islands as separate parallel jobs, and the store at which they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.ranks import run_ranks

#: a lossy codec whose errors go into later messages
FED_BACK: dict[str, Any] = {
    "preset": "diloco", "codec": "blockint", "bits": 4, "error_feedback": True,
}  # fmt: skip


@contextmanager
def store() -> Iterator[int]:
    """Yield the loopback port of a store of this process."""
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield held.port
    del held


@contextmanager
def rendezvous() -> Iterator[str]:
    """Yield the address of a store."""
    with store() as port:
        yield f"tcp://127.0.0.1:{port}"


def start(
    jobs: ThreadPoolExecutor, ranks: int, work: Callable[..., Any], *args: Any
) -> Future[Any]:
    """Start a job; returns the results of its ranks in rank order."""
    return jobs.submit(run_ranks, ranks, work, *args)


def beside(*jobs: tuple[int, Callable[..., Any], tuple[Any, ...]]) -> list[list[Any]]:
    """Run jobs (ranks, function, arguments) in parallel; return their ranks' results."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [start(pool, ranks, work, *args) for ranks, work, args in jobs]
        return [job.result() for job in running]


def gathered(values: Tensor) -> list[Tensor]:
    """Return the vectors of all ranks of the job."""
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return found


def inside(islands: Any = 2, **sync: Any) -> dict[str, Any]:
    """Return a block with islands of so many ranks inside a job."""
    sync = {"islands": islands, **sync}
    return {"sync": sync, "min_bytes": 0, "ledger": {"every": 1_000_000}}


def block(
    address: str, timeout_s: float = 60.0, at_start: int = 2, name: str | None = None, **sync: Any
) -> dict[str, Any]:
    """Return a block with islands that meet at ``address``; ``name``: of this one."""
    where: Any = {"rendezvous": address, "timeout_s": timeout_s, "at_start": at_start}
    where["join_timeout_s"] = 120.0
    if name is not None:
        where["name"] = name
    return inside(where, **{"every": 2, **sync})
