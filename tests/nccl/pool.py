"""Ranks over NCCL that share one GPU, each with a host name of its own (``scripts/one_gpu.py``).

``tests.ranks`` forks its ranks from a process that has imported DeepSpeed for a CPU; these are
processes of their own. Importing takes one of them about 10 s, so a few are kept that have done so
and wait to be told who they are. On a CPU, and where asked for, they talk over gloo. Without a GPU
they can have one that stands in for it (``tests/stand_ins/cuda``): HYBRIDCOMP_NCCL_DEVICE=stand-in.
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

#: processes that are kept ready for the next pool
AHEAD = {"cuda": 0 if begin.is_asked() else 4}
#: seconds that ranks may take to start
START_S = 300.0
#: characters of what a failing rank printed last that are shown
TAIL = 3000


class Process:
    """A rank that has imported everything and waits for its name."""

    def __init__(self, device: str) -> None:
        self.pipe, theirs = Pipe()
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {
            **os.environ, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1",
            # else a rank that has lost another one sleeps for a minute, to write down what it did
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
        """The end of what it has printed."""
        size = os.fstat(self._out.fileno()).st_size
        start = max(0, size - TAIL)
        return os.pread(self._out.fileno(), size - start, start).decode(errors="replace")


class Reserve:
    """Processes that nobody uses yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Process]] = {}

    def take(self, device: str, count: int) -> list[Process]:
        """``count`` of them; as many as are missing are started, and some for the next."""
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
    """``RankPool`` over NCCL on one GPU; ``per_node`` consecutive ranks count as one node."""

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
        key = bytes(current_process().authkey)  # tensors of results are fetched with it
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
        """Return when all ranks have imported everything, or one has died, or after START_S.

        What a test allows is for what it asks of them: beside other tests imports take minutes.
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
    """One rank: imports, learns who it is, then calls what it is told to."""
    pipe: Connection = Connection(int(sys.argv[1]))
    device = os.environ["DS_ACCELERATOR"]
    if begin.is_asked() and device == "cuda":
        begin.begin()
    import torch
    import torch._dynamo  # which the first optimizer would import

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
        # upstream pads with uninitialized memory, which must not be filled with NaN
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    serve(pipe, *place)


if __name__ == "__main__":
    main()
