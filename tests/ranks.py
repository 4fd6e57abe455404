"""Run functions on several ranks over gloo, or on fake devices if ``HYBRIDCOMP_NCCL_DEVICE`` is
set.

A forkserver with torch preloaded starts a rank in about 0.2 s instead of 9 s. ``run_ranks`` uses
new ranks, for functions that leave global state behind (DeepSpeed). ``RankPool`` keeps its ranks
for many short functions, ``Trained`` for many trainings. ``tests/stand_ins/cuda`` has the fake
devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from tests.paths import ROOT
from tests.stand_ins.cuda import begin

if TYPE_CHECKING:
    from typing_extensions import Self

#: ``run(world_size, function, *args)``, as the fixture ``on_ranks`` provides it
RunRanks = Callable[..., list[Any]]

#: importing DeepSpeed takes a rank 5 s; a fork of a process that has it takes none
PRELOAD = ["torch", "torch.distributed", "numpy", "deepspeed"]
#: imports of an optimizer's first step and of megatron-core, another 7 s, and all of hybridcomp
COMPILER = [
    "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "tests.preloaded",
]  # fmt: skip
#: seconds in which other ranks may fail too, so that the message can show all failures
GRACE_S = 1.0
#: seconds after which ranks count as hanging: alone they need seconds, beside other jobs minutes
LIMIT_S = 240.0


def python_path() -> str:
    """Return this repository in front of the current PYTHONPATH."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def fork_server() -> ForkServerContext:
    """Return a context whose processes fork from one that has imported ``PRELOAD``.

    Without a GPU it also imports ``COMPILER``, which detects GPUs at import (torch 2.11), after
    which forks could not use one.
    """
    import torch

    os.environ.setdefault("TORCH_WARM_POOL", "0")  # no compiler workers in the server
    context = mp.get_context("forkserver")
    if begin.is_asked():
        os.environ["DS_ACCELERATOR"] = "cuda"  # DeepSpeed detects it once, in that process
        context.set_forkserver_preload([begin.PRELOAD, *PRELOAD, *COMPILER])
        return context
    context.set_forkserver_preload(PRELOAD if torch.cuda.is_available() else [*PRELOAD, *COMPILER])
    return context


def forget_inherited() -> None:
    """Hide from the garbage collector the objects inherited through the fork.

    They are half a million objects of torch and DeepSpeed: every ``install`` would search them for
    early engines, which takes 0.6 core seconds and copies their memory.
    """
    gc.freeze()


def _end_with_parent() -> None:
    """Have this process killed when its parent ends: stopped, it does not see its pipe close."""
    alive = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if alive is not None:
        os.close(alive)  # the server ends when nobody holds this
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _main(
    pipe: Connection, streams: list[Connection], rank: int, world_size: int, folder: str
) -> None:
    """Run a rank: join the group, then call functions from ``pipe`` until it closes.

    ``streams``: output and errors of the process that wants the rank, not of the server.
    """
    forget_inherited()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        DS_ACCELERATOR="cuda" if begin.is_asked() else "cpu",
        OMP_NUM_THREADS="1",
        TORCH_EXTENSIONS_DIR=f"{folder}/ext",
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )
    if begin.is_asked():
        begin.take_device()
    serve(pipe, "nccl" if begin.is_asked() else "gloo", rank, world_size, folder)


def serve(pipe: Connection, backend: str, rank: int, world_size: int, folder: str) -> None:
    """Join the group over ``backend``, then call functions from ``pipe`` until it closes."""
    import torch
    import torch.distributed as dist

    _end_with_parent()
    torch.set_num_threads(1)
    with Path(folder, f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=LIMIT_S),
            )
            try:
                while True:
                    function, args = pipe.recv()
                    pipe.send((True, function(*args)))
            except EOFError:
                pass  # the parent is done with us
            finally:
                dist.destroy_process_group()
        except BaseException:
            with contextlib.suppress(OSError):  # the parent may have given up
                pipe.send((False, traceback.format_exc()))
        finally:
            sys.stdout.flush()


class Process(Protocol):
    """Methods of a rank's process that a pool uses."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


class RankPool:
    """``world_size`` persistent ranks; use as a context manager or call ``close``."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Process] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = LIMIT_S,
        grace: float = GRACE_S,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the results by rank.

        When a rank fails, the others get ``grace`` seconds to fail too.

        ``function`` must be importable (top level of a module), its results picklable. Raises
        AssertionError with the traceback of every failed rank, first failure first, or TimeoutError
        with the stacks of hanging ranks. Either ends the ranks: the next ``run`` starts new ones.
        """
        if not self._pipes:
            self._start()
        try:
            self._signal(signal.SIGCONT)
            for pipe in self._pipes:
                pipe.send((function, args))
            results = self._collect(timeout, grace)
        except BaseException:
            self.close(at_once=True)
            raise
        # every group of gloo has a thread that wakes up 100 times a second
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.world_size)]

    def threads(self) -> int:
        """Return the largest number of threads of a rank; 0 if none runs."""
        return max(
            (len(os.listdir(f"/proc/{each.pid}/task")) for each in self._processes), default=0
        )

    def close(self, at_once: bool = False) -> None:
        """End the ranks: by closing pipes, or killing them ``at_once`` if they may hang."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not at_once:
                process.join(timeout=10)
            if process.is_alive():
                process.kill()
            process.join(timeout=10)
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = fork_server()
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "ext").mkdir()
        streams = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            place = (rank, self.world_size, self._folder.name)
            process = context.Process(target=_main, args=(theirs, streams, *place), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for stream in streams:
            stream.close()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def _collect(self, timeout: float, grace: float) -> dict[int, Any]:
        """Wait for all ranks; the failure of a rank shortens the wait for the others."""
        running = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while running:
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = running.pop(pipe)
                fine, value = self._receive(pipe, rank)
                if fine:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} of {self.world_size}:\n{value}")
                    deadline = min(deadline, time.monotonic() + grace)
        left = sorted(running.values())
        if failures:
            waiting = f"\nranks {left} were still running" if left else ""
            raise AssertionError("\n".join(failures) + waiting)
        if left:
            raise TimeoutError(
                f"ranks {left} of {self.world_size} hang after {timeout} s\n{self._stacks(left)}"
            )
        return results

    def _receive(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        try:
            fine, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=5)
            return False, f"died without a word, exit code {self._processes[rank].exitcode}"
        return fine, value

    def _stacks(self, ranks: list[int]) -> str:
        """Return the stacks of hanging ranks, from their faulthandler."""
        assert self._folder is not None
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        files = {rank: Path(self._folder.name, f"stack{rank}") for rank in ranks}
        return "\n".join(
            f"rank {rank}:\n{file.read_text() if file.exists() else 'not started'}"
            for rank, file in files.items()
        )


class Trained:
    """Results of jobs by rank, each trained on the same ranks when a test first asks for it.

    Args:
        world_size: number of ranks.
        run: ``run(jobs)`` on every rank; returns a result for each job.
        jobs: jobs by key, for ``trained[key]``.
    """

    def __init__(
        self, world_size: int, run: Callable[..., Any], jobs: Mapping[Any, Any] | None = None
    ) -> None:
        self.pool = RankPool(world_size)
        self._run, self._jobs = run, jobs or {}
        self._known: dict[str, list[Any]] = {}

    def __getitem__(self, key: Any) -> list[Any]:
        return self(self._jobs[key])

    def __call__(self, job: Any) -> list[Any]:
        """Return the job's results by rank; jobs of the same ``repr`` are the same."""
        name = repr(job)
        if name not in self._known:
            self._known[name] = [found for (found,) in self.pool.run(self._run, [job])]
        return self._known[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = LIMIT_S
) -> list[Any]:
    """Run ``RankPool.run`` on new ranks that end afterwards."""
    with RankPool(world_size) as pool:
        return pool.run(function, *args, timeout=timeout)
