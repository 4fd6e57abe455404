"""torch's elastic agents, as ``torchrun`` runs them, whose restarts cost no import.

An agent, and each rank that it starts, is a fork of a process that has torch and hybridcomp. A
start of two ranks takes a second of a core in place of ten, so that many jobs lose a node in turn.
"""

from __future__ import annotations

import os
import runpy
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.ranks import forget_inherited, fork_server


class Node:
    """An agent and its two ranks, with the part of ``subprocess.Popen`` that a test asks for."""

    def __init__(self, folder: Path, port: int, script: str, words: tuple[str, ...]) -> None:
        # not daemonic: those may have no children
        self._process: ForkServerProcess = fork_server().Process(
            target=_agent, args=(folder, port, script, words), daemon=False
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the agent's exit status; None: it runs."""
        return self.returncode

    def wait(self) -> None:
        self._process.join()


def _agent(folder: Path, port: int, script: str, words: tuple[str, ...]) -> None:
    _begin(folder)
    os.environ.update(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", GLOO_SOCKET_IFNAME="lo")
    config = LaunchConfig(
        min_nodes=1, max_nodes=2, nproc_per_node=2, run_id="elastic", rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}", local_addr="127.0.0.1", max_restarts=20,
        monitor_interval=0.1, start_method="fork",
        rdzv_configs={"last_call_timeout": 1, "keep_alive_interval": 1,
                      "keep_alive_max_attempt": 3},
    )  # fmt: skip
    elastic_launch(config, _rank)(script, words)


def _rank(script: str, words: tuple[str, ...]) -> None:
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _begin(folder: Path) -> None:
    """Write to the log of the test."""
    forget_inherited()
    log = os.open(folder / "agents.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
