"""Run a training script unchanged in a forked rank; each step waits until it is requested."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

from gpt import torch_engines

from benchmarks.training_bench import empty
from benchmarks.training_bench.spec import Spec
from benchmarks.training_bench.worker import name_block
from benchmarks.training_bench.worker import run as run_script
from benchmarks.waits_bench.recorder import Recorder
from lab.namespaces import end_with_parent


class Seat:
    """This rank's end of the pipe, the steps left in its turn, and the profiler."""

    _recorder: Recorder | None

    def __init__(self, pipe: Connection, rank: int = 0) -> None:
        self._pipe, self._left, self._told = pipe, 0, False
        self._steps: list[dict[str, float]] = []
        self._rank, self._recorder = rank, None

    def before(self, trainer: Any) -> None:
        """Wait for a turn unless one is running."""
        while not self._left:
            if self._recorder is not None:
                self._recorder.close()
                self._recorder = None
            if self._told:
                give_memory_back()
            self._pipe.send(("steps", self._steps))
            self._steps, self._told = [], True
            word, *rest = self._pipe.recv()
            if word == "end":
                self._end(trainer)
            self._left = rest[0]
            empty.set_empty(bool(rest[1]))
            if rest[2:]:
                self._recorder = Recorder(f"{rest[2]}.{self._rank}.json.gz")

    def step(self) -> AbstractContextManager[Any]:
        """Return the context of a step, which marks the step if the profiler records this turn."""
        return nullcontext() if self._recorder is None else self._recorder.step()

    def after(self, step: dict[str, float]) -> None:
        """Count a step; end this rank if the controlling process has ended."""
        self._steps.append(step)
        self._left -= 1
        if self._pipe.poll():  # nothing is sent during a turn: the other end closed
            print("Error: the process that started this rank has ended", flush=True)
            os._exit(1)

    def _end(self, trainer: Any) -> None:
        """Send the run's ledger, then exit without destroying the process group."""
        found = {"ledger": ledger_of(trainer.engine), "memory": peak_memory()}
        self._pipe.send(("end", found))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def ledger_of(engine: Any) -> dict[str, Any]:
    """Return the ledger of all ranks by dimension and direction; collective."""
    from hybridcomp.session.engine_session import session_of

    session = session_of(engine)
    if session is None and isinstance(engine, torch_engines.Engine):
        from hybridcomp.patches.torch.steps import models

        session = next((one.session for one in models()), None)
    if session is None or session.reporter is None:
        return {}
    reporter = session.reporter
    reporter.report(getattr(engine, "global_steps", 0))
    rows: dict[str, Any] = reporter._channels.ledger.rows(reporter._totals, reporter._used)
    return rows


def give_memory_back() -> None:
    """Free this rank's cached memory for the next rank."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak_memory() -> int:
    """Return torch's peak memory in bytes."""
    import torch

    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else 0


def watched(step: Callable[..., float], seat: Seat) -> Callable[..., float]:
    """Wrap ``step`` of a trainer: wait for this job's turn and time it."""

    def around(self: Any, batches: Any) -> float:
        seat.before(self)
        start = time.perf_counter()
        with seat.step():
            loss = step(self, batches)
        seconds = time.perf_counter() - start
        seat.after({"seconds": seconds, "loss": float(loss), "samples": self.share.global_batch})
        return loss

    return around


def run(pipe: Connection, spec: Spec) -> None:
    """Train as the script would."""
    os.environ.update(spec.env)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    if spec.empty:
        empty.install()
    if spec.transport:
        from benchmarks.training_bench import gpu_memory

        gpu_memory.join(spec.transport)
    name_block(spec.arguments)
    if spec.patched:
        importlib.import_module("hybridcomp").install()
    seat = Seat(pipe, spec.rank)
    status = run_script(spec.program, spec.arguments, lambda step: watched(step, seat))
    if status:
        raise SystemExit(f"Error: {spec.program} ended with {status}")


def main(pipe: Connection, spec: Spec) -> None:
    """Run in the forked process; output goes to ``spec.log``."""
    end_with_parent()
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        run(pipe, spec)
        atexit._run_exitfuncs()  # writes the ledger's totals, which a forked process would not
        pipe.send(("over", {"memory": peak_memory()}))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
