"""Where a cell runs: on the nodes of a lab (scripts/netlab.py), or plainly over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from training_bench.cells import SCRIPTS, Layout
from training_bench.worker import PREFIX

Steps = list[dict[str, float]]


class CellError(RuntimeError):
    """A training that failed; the message is the last line that says why."""


class Runner(Protocol):
    """A network."""

    def run(self, command: list[str], layout: Layout, timeout: float) -> list[Steps]:
        """Run ``command`` (after the interpreter) on every rank; the steps of each rank."""


class Loopback:
    """All ranks on this machine, nothing shaped; needs no root."""

    def run(self, command: list[str], layout: Layout, timeout: float) -> list[Steps]:
        """Raises CellError."""
        ranks = layout.nodes * layout.per_node
        with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
            probe.close()
            files = [Path(folder, f"rank{rank}") for rank in range(ranks)]
            processes = []
            for rank, file in enumerate(files):
                node, local = divmod(rank, layout.per_node)
                places = {
                    "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": layout.per_node, "GROUP_RANK": node,
                    "GROUP_WORLD_SIZE": layout.nodes, "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
                env = {
                    **os.environ,
                    **environment(folder),
                    **{k: str(v) for k, v in places.items()},
                }
                with file.open("w") as out:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *command], stdout=out, stderr=out, env=env
                        )
                    )
            statuses = _wait(processes, timeout)
            found = [
                parse(status, file.read_text(errors="replace"))
                for status, file in zip(statuses, files, strict=True)
            ]
        # the counters of a machine's own loopback hold everybody's bytes
        return [[{**step, "sent": 0.0} for step in steps] for steps in found]


class InLab:
    """Ranks in the network namespaces of a lab that has the right rate."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    def run(self, command: list[str], layout: Layout, timeout: float) -> list[Steps]:
        """Raises CellError."""
        with tempfile.TemporaryDirectory() as folder:
            result = self.lab.run(
                [sys.executable, *command], per="rank", env=environment(folder), timeout=timeout
            )
        first = [s not in (0, 125) for s in result.statuses]  # 125: ended because another failed
        order = sorted(range(len(first)), key=lambda rank: not first[rank])
        found = {rank: parse(result.statuses[rank], result.outputs[rank]) for rank in order}
        return [found[rank] for rank in range(len(first))]


@contextlib.contextmanager
def network(layout: Layout, rate: int | None, loopback: bool) -> Iterator[Runner]:
    """A runner; ``rate``: bits a second of every node's link, None: not shaped."""
    if loopback:
        assert rate is None, "a loopback has no rate"
        yield Loopback()
        return
    from lab.cluster import Lab
    from lab.layout import Layout as Nodes
    from lab.layout import Rates

    with Lab(Nodes.parse(layout.lab), Rates(link=rate)) as lab:
        yield InLab(lab)


def environment(folder: str) -> dict[str, str]:
    """Of every rank: this checkout first, kernels built by nobody else."""
    path = os.pathsep.join(
        part for part in (str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")) if part
    )
    return {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": folder, "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def parse(status: int, output: str) -> Steps:
    """The steps that a worker printed. Raises CellError with the line that explains a failure."""
    lines = output.splitlines()
    found = [line for line in lines if line.startswith(PREFIX)]
    if status == 0 and found:
        steps: Steps = json.loads(found[-1][len(PREFIX) :])
        if steps:
            return steps
    rest = [line for line in lines if line.strip() and not line.startswith(PREFIX)]
    errors = [line for line in rest if "Error" in line and not line.startswith(" ")]
    said = errors[-1] if errors else (rest[-1] if rest else "nothing was printed")
    raise CellError(f"status {status}: {said.strip()[:300]}")


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit statuses; when one fails or time is up the others are ended."""
    import time

    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed or time.monotonic() > deadline:
            time.sleep(1.0)
            for process in processes:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    return [process.wait() for process in processes]
