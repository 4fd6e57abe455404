"""Run a function on several ranks of one machine, over gloo.

A forkserver with torch preloaded starts a rank in about 0.2 s instead of 9 s.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "numpy"]


def _context() -> mp.context.ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _main(
    pipe: Connection, rank: int, world_size: int, folder: str, function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
        TORCH_EXTENSIONS_DIR=f"{folder}/ext", MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        try:
            pipe.send((True, function(*args)))
        finally:
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank, with torch.distributed ready; results by rank.

    ``function`` must be importable (top level of a module), its results picklable. The first
    failing rank's traceback is raised as an AssertionError, a hang as a TimeoutError; ranks that
    still run are ended.
    """
    context = _context()
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ext").mkdir()
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_main, args=(theirs, rank, world_size, folder, function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes[mine] = rank
            processes.append(process)
        try:
            while pipes:
                ready = wait(list(pipes), timeout=timeout)
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pipes.values())} hang")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = pipes.pop(pipe)
                    try:
                        fine, value = pipe.recv()
                    except EOFError:
                        raise AssertionError(f"rank {rank} died without a word") from None
                    if not fine:
                        raise AssertionError(value)
                    results[rank] = value
        finally:
            for process in processes:
                if pipes:
                    process.terminate()
                process.join(timeout=10)
    return [results[rank] for rank in range(world_size)]
