"""Start islands as separate parallel jobs, and the store at which they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.ranks import run_ranks


@contextmanager
def rendezvous() -> Iterator[str]:
    """Yield the address of a store."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    yield f"tcp://127.0.0.1:{store.port}"
    del store


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


def block(address: str, timeout_s: float = 60.0, at_start: int = 2, **sync: Any) -> dict[str, Any]:
    """Return a block with islands that meet at ``address``."""
    where = {"rendezvous": address, "timeout_s": timeout_s, "at_start": at_start}
    where["join_timeout_s"] = 120.0
    return {
        "sync": {"islands": where, "every": 2, **sync},
        "min_bytes": 0,
        "ledger": {"every": 1_000_000},
    }
