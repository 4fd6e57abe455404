"""Fork ranks from a process with all imports done, and control them through pipes.

Importing torch, DeepSpeed and Megatron-core takes over ten core seconds per rank; a fork server
starts thirty ranks in two. The server never touches the GPU, so its children may.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks.shared import say
from benchmarks.training_bench import preloaded
from benchmarks.training_bench.spec import Spec

ROOT = Path(__file__).resolve().parents[3]
#: modules that the server imports; the second is ours and imports the others if installed
PRELOAD = ["torch", "benchmarks.training_bench.preloaded"]
#: final lines of a rank's log that are searched for the error to quote
TAIL = 40


class JobError(RuntimeError):
    """A rank ended or timed out; the message quotes its log."""


def server(timeout: float, tensor_parallel: bool = False) -> ForkServerContext:
    """Start the fork server with all imports done. Raises JobError if its ranks cannot work.

    It imports torch alone if another package touches the GPU during its import.
    """
    context, began = mp.get_context("forkserver"), time.monotonic()
    os.environ[preloaded.TENSOR_PARALLEL] = str(int(tensor_parallel))
    # for the server's imports; it does not copy this process's sys.path
    paths = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    context.set_forkserver_preload(PRELOAD)
    try:
        _probe(context, timeout)
    except JobError as error:
        say(f"{error}; each rank imports DeepSpeed by itself")
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        context.set_forkserver_preload(PRELOAD[:1])
        _probe(context, timeout)
    say(f"imported in {time.monotonic() - began:.1f} s")
    return context


def _probe(context: ForkServerContext, timeout: float) -> None:
    """Raise JobError if a rank lacks a package or cannot use the GPU."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_try, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        said = ours.recv() if ours.poll(timeout) else f"nothing within {timeout:.0f} s"
    except EOFError:
        said = "it ended"
    process.join(10)
    if said:
        raise JobError(f"a process of the fork server: {said}")


def _try(pipe: Connection) -> None:
    import torch

    from benchmarks.training_bench import gpu_rank  # noqa: F401

    try:
        if os.environ["DS_ACCELERATOR"] == "cuda":
            torch.zeros(1, device="cuda")
        pipe.send("")
    except RuntimeError as error:
        pipe.send(str(error).splitlines()[0])


@dataclass
class Job:
    """All ranks of a training. Every method raises JobError if a rank has failed."""

    processes: list[ForkServerProcess]
    pipes: list[Connection]
    logs: list[str]
    timeout: float
    _done: bool = field(default=False)

    @classmethod
    def start(cls, context: ForkServerContext, specs: Sequence[Spec], timeout: float) -> Job:
        """Fork the ranks; each replies once before its first step."""
        from benchmarks.training_bench import gpu_rank

        processes, pipes = [], []
        for spec in specs:
            ours, theirs = context.Pipe()
            process = context.Process(target=gpu_rank.main, args=(theirs, spec), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return cls(processes, pipes, [spec.log for spec in specs], timeout)

    def ask(self, *words: Any) -> list[Any]:
        """Send ``words`` to all ranks and return their replies."""
        self.tell(*words)
        return self.answers()

    def tell(self, *words: Any) -> None:
        """Send ``words`` to all ranks."""
        for pipe in self.pipes:
            try:
                pipe.send(words)
            except OSError:
                raise JobError(self.why()) from None

    def answers(self) -> list[Any]:
        """Return the replies of all ranks, in rank order."""
        deadline = time.monotonic() + self.timeout
        found: dict[int, Any] = {}
        while len(found) < len(self.pipes):
            waiting = [pipe for i, pipe in enumerate(self.pipes) if i not in found]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobError(f"no answer within {self.timeout:.0f} s: {self.why()}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[self.pipes.index(pipe)] = pipe.recv()
                except (EOFError, OSError):
                    time.sleep(0.5)  # until the log is written
                    raise JobError(self.why()) from None
        return [found[rank] for rank in range(len(self.pipes))]

    def why(self) -> str:
        """Return the last error line of the first rank whose log has one, else a last line."""
        found = ""
        for log in self.logs:
            lines = Path(log).read_text(errors="replace").splitlines()[-TAIL:]
            said = [line for line in lines if "Error" in line and not line.startswith((" ", "["))]
            if said:
                return f"{Path(log).name}: {said[-1].strip()[:400]}"
            found = found or (lines[-1].strip()[:400] if lines else "")
        return found or "nothing was printed"

    def said(self, part: str) -> list[str]:
        """Return lines of the first rank's log that contain ``part``."""
        lines = Path(self.logs[0]).read_text(errors="replace").splitlines()
        return [line.strip() for line in lines if part in line]

    def close(self) -> None:
        """End the ranks."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


def environment(gpu: bool, threads: int = 1) -> dict[str, str]:
    """Return the server's environment, which all ranks inherit."""
    return {
        "DS_ACCELERATOR": "cuda" if gpu else "cpu", "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # DeepSpeed's builder cannot parse "9.0a"
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0").replace("a", ""),
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }  # fmt: skip
