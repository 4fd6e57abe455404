"""Start compressed trainings (``trainer.py``) with DeepSpeed's launcher and torchrun.

``deepspeed`` and ``torchrun`` run the commands. ``agent`` runs torchrun's agent in a process forked
after all imports, which takes one second instead of ten; the agent starts, monitors and ends the
ranks as separate processes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

import one_gpu
from fuzzing import trainer
from lab.namespaces import started

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("agent", "deepspeed", "torchrun")
PRELOAD = ["torch", "torch.distributed.launcher.api", "deepspeed", "hybridcomp", "fuzzing.trainer"]


def server() -> ForkServerContext:
    """Start the fork server of ``agent``; its first job waits for the imports."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH")])
    )
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class Job:
    """A training: its launcher, ranks and output."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        launcher: str = "agent",
        context: ForkServerContext | None = None,
    ) -> None:
        self.folder, self.settings = folder, {"ranks": 2, **settings}
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("pid*"), *folder.glob("step*")]:
            old.unlink()
        self._bytes: list[bytes] = []
        self.code: int | None = None
        self._began = time.monotonic()
        if launcher == "agent":
            self._pid = self._start_agent(context or server())
        else:
            self._pid = self._start_command(launcher)

    @property
    def text(self) -> str:
        """Return the output so far."""
        return b"".join(self._bytes).decode(errors="replace")

    def _start_agent(self, context: ForkServerContext) -> int:
        read, write = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_agent, args=(str(self.folder), dict(self.settings), write)
        )
        self._process.start()
        write.close()
        self._reader = threading.Thread(target=self._read_pipe, args=(read,), daemon=True)
        self._reader.start()
        assert self._process.pid is not None
        return self._process.pid

    def _read_pipe(self, pipe: Any) -> None:
        with contextlib.suppress(EOFError, OSError), os.fdopen(os.dup(pipe.fileno()), "rb") as file:
            self._read(file)

    def _read(self, file: IO[bytes]) -> None:
        for line in file:
            self._bytes.append(line)

    def _start_command(self, launcher: str) -> int:
        command = shutil.which(launcher, path=str(Path(sys.executable).parent))
        assert command is not None, f"{launcher} is not installed"
        count = str(self.settings["ranks"])
        script = str(Path(trainer.__file__).resolve())
        words = {
            "deepspeed": [
                "--num_gpus", count, "--master_addr", "127.0.0.1", "--master_port",
                str(one_gpu.free_port()), "--module", "hybridcomp.run", script,
            ],
            # no --master_port: in a static rendezvous all restarts would share a store
            "torchrun": [
                "--nproc_per_node", count, "--standalone",
                "--max_restarts", str(self.settings.get("restarts", 0)),
                "-m", "hybridcomp.run", script,
            ],
        }[launcher]  # fmt: skip
        environment = {**os.environ, **_environment(self.folder, self.settings)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
        process = subprocess.Popen(
            [sys.executable, command, *words], cwd=self.folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()
        self._command = process
        return process.pid

    def rank_pid(self, rank: int) -> int | None:
        """Return a rank's process; None before it has begun and after it has ended."""
        try:
            pid, began = (self.folder / f"pid{rank}").read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if str(started(int(pid))) == began else None

    def step(self, rank: int) -> int:
        """Return a rank's current step, -1 before the first."""
        try:
            return int((self.folder / f"step{rank}").read_text())
        except (OSError, ValueError):
            return -1

    def has_ended(self) -> bool:
        """Return whether the launcher has ended; its exit status is then ``code``."""
        if self.code is None:
            if hasattr(self, "_command"):
                self.code = self._command.poll()
            else:
                self.code = self._process.exitcode
        return self.code is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the launcher for ``seconds``; return whether it ended."""
        deadline = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        self._reader.join(60)  # to the last line: until all printing processes have ended
        return True

    def left(self) -> list[int]:
        """Return the job's running processes."""
        launcher = [] if self.has_ended() else [self._pid]
        ranks = (self.rank_pid(rank) for rank in range(self.settings["ranks"]))
        return [*launcher, *(pid for pid in ranks if pid is not None)]

    def left_after(self, seconds: float) -> list[int]:
        """Return the processes still running after ``seconds``; killed ones need a core to exit."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        """Kill the remaining processes."""
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        self.wait(5)


def _environment(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        "CHAOS_FOLDER": str(folder), "CHAOS_SETTINGS": json.dumps(dict(settings)),
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_EXTENSIONS_DIR": str(folder / "ext"), "PYTHONWARNINGS": "ignore",
        # restarted ranks get a new store: in the old one gloo would read addresses of ranks that
        # have ended ("Connect timeout")
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip


def _agent(folder: str, settings: dict[str, Any], pipe: Any) -> None:
    """Run torchrun's agent in this process."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    for stream in (1, 2):
        os.dup2(pipe.fileno(), stream)
    pipe.close()
    os.chdir(folder)
    os.environ.update(_environment(Path(folder), settings))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=settings["ranks"], run_id=Path(folder).name,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
        max_restarts=settings.get("restarts", 0), monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, _rank)()


def _rank() -> None:
    """Run a rank that ends as a script does: with an exit status, its error printed by the hook."""
    import hybridcomp

    try:
        hybridcomp.install()
        trainer.main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
