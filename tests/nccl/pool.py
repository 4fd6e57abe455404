"""Ranks over NCCL that share one GPU, each with its own host name (``scripts/one_gpu.py``).

``tests.ranks`` forks its ranks from a process that imported DeepSpeed for a CPU; these are separate
processes. Imports take about 10 s, so a few processes with finished imports wait for a rank to run.
On a CPU, or on request, they use gloo. Without a GPU HYBRIDCOMP_NCCL_DEVICE=stand-in uses a fake
one (``tests/stand_ins/cuda``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from multiprocessing import current_process
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.ranks import RankPool, python_path, serve
from tests.stand_ins.cuda import begin

sys.path.insert(0, str(ROOT / "scripts"))

import one_gpu

#: processes kept ready for the next pool
AHEAD = {"cuda": 0 if begin.is_asked() else 4}
#: seconds that ranks may take to start
START_S = 300.0
#: characters shown of a failing rank's last output
TAIL = 3000


class Process:
    """A process with finished imports that waits for its rank."""

    def __init__(self, device: str) -> None:
        self.pipe, theirs = Pipe()
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {
            **os.environ, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1",
            # otherwise a rank that lost another sleeps for a minute to dump its log
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nccl.pool", str(theirs.fileno())],
            env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._out,
            stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()

    def printed(self) -> str:
        """Return the end of its output."""
        size = os.fstat(self._out.fileno()).st_size
        start = max(0, size - TAIL)
        return os.pread(self._out.fileno(), size - start, start).decode(errors="replace")


class Reserve:
    """Processes without a rank yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Process]] = {}

    def take(self, device: str, count: int) -> list[Process]:
        """Take ``count`` of them; starts missing ones, and some for the next call."""
        waiting = [process for process in self._waiting.pop(device, []) if process.is_alive()]
        waiting += [Process(device) for _ in range(count + AHEAD.get(device, 0) - len(waiting))]
        self._waiting[device] = waiting[count:]
        return waiting[:count]

    def close(self) -> None:
        """End them."""
        for process in [process for kept in self._waiting.values() for process in kept]:
            process.pipe.close()
            process.kill()
            process.join()
        self._waiting.clear()


RESERVE = Reserve()
atexit.register(RESERVE.close)


class NcclPool(RankPool):
    """``RankPool`` over NCCL on one GPU; ``per_node`` consecutive ranks count as a node."""

    def __init__(
        self,
        world_size: int,
        *,
        per_node: int = 1,
        device: str = "cuda",
        backend: str | None = None,
    ) -> None:
        super().__init__(world_size)
        self._per_node, self._device = per_node, device
        self._backend = backend or ("nccl" if device == "cuda" else "gloo")
        self._ranks: list[Process] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = RESERVE.take(self._device, self.world_size)
        key = bytes(current_process().authkey)  # needed to fetch tensors of results
        for rank, process in enumerate(self._ranks):
            environment = one_gpu.environment(
                rank, self.world_size, per_node=self._per_node, device=self._device
            )
            if begin.is_asked() and self._device == "cuda":
                environment["LOCAL_RANK"] = str(begin.INDEX)
            environment["TORCH_EXTENSIONS_DIR"] = f"{self._folder.name}/extensions{rank}"
            place = self._backend, rank, self.world_size, self._folder.name
            process.pipe.send((environment, key, place))
            self._pipes.append(process.pipe)
            self._processes.append(process)
        self._await_ranks(Path(self._folder.name))

    def _await_ranks(self, folder: Path) -> None:
        """Wait until all ranks have finished their imports, one has died, or START_S is over.

        A test's timeout excludes this: beside other tests imports take minutes.
        """
        until = time.monotonic() + START_S
        missing = [folder / f"stack{rank}" for rank in range(self.world_size)]
        while missing and time.monotonic() < until:
            if not all(process.is_alive() for process in self._ranks):
                return
            time.sleep(0.02)
            missing = [file for file in missing if not file.exists()]

    def _receive(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        fine, value = super()._receive(pipe, rank)
        return fine, value if fine else f"{value}\nprinted last:\n{self._ranks[rank].printed()}"

    def _stacks(self, ranks: list[int]) -> str:
        printed = "\n".join(f"rank {r} printed last:\n{self._ranks[r].printed()}" for r in ranks)
        return f"{super()._stacks(ranks)}\n{printed}"


def main() -> None:
    """Run a rank: import, receive the rank, then call functions from the pipe."""
    pipe: Connection = Connection(int(sys.argv[1]))
    device = os.environ["DS_ACCELERATOR"]
    if begin.is_asked() and device == "cuda":
        begin.begin()
    import torch
    import torch._dynamo  # the first optimizer would import it

    if find_spec("deepspeed") is not None:
        import deepspeed  # noqa: F401
    if device == "cuda" and find_spec("megatron") is not None:
        import megatron.core  # noqa: F401
    try:
        environment, key, place = pipe.recv()
    except EOFError:
        return
    current_process().authkey = key
    os.environ.update(environment)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True, warn_only=True)
        # upstream pads with uninitialized memory, which NaN must not fill
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    serve(pipe, *place)


if __name__ == "__main__":
    main()
