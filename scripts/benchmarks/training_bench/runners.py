"""Run a cell on the nodes of a lab (scripts/netlab.py), or over loopback."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from benchmarks.training_bench.cells import SCRIPTS, Layout
from benchmarks.training_bench.worker import PREFIX
from lab.layout import PORT, Rates
from lab.layout import Layout as Nodes
from lab.namespaces import end_with_parent
from lab.team import STOPPED, Team

Steps = list[dict[str, float]]


class CellError(RuntimeError):
    """A training failed; the message is the log line that explains it."""


class Runner(Protocol):
    """A network, and how to start ranks on it."""

    counts: bool  # whether only the ranks use the interface

    def started(
        self, command: list[str], layout: Layout, env: dict[str, str]
    ) -> AbstractContextManager[Team]:
        """Start ``command`` (after the interpreter) on every rank; kill it after the body."""

    def shape(self, rate: int | None) -> None:
        """Set the rate of every node's link in bits per second, None: no limit."""


class Loopback:
    """All ranks on this machine without rate limits; needs no root."""

    counts = False

    @contextmanager
    def started(self, command: list[str], layout: Layout, env: dict[str, str]) -> Iterator[Team]:
        """Start ``command`` on every rank; see ``Runner``."""
        ranks, team, port = layout.nodes * layout.per_node, Team(), free_port()
        try:
            for rank in range(ranks):
                node, local = divmod(rank, layout.per_node)
                places = {
                    "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": layout.per_node, "GROUP_RANK": node,
                    "GROUP_WORLD_SIZE": layout.nodes, "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
                variables = {**os.environ, **{k: str(v) for k, v in places.items()}, **env}
                team.start([sys.executable, *command], end_with_parent, variables, None, None)
            yield team
        finally:
            team.end()

    def shape(self, rate: int | None) -> None:
        """Reject every rate but None."""
        assert rate is None, "a loopback has no rate"


class InLab:
    """Ranks in the network namespaces of a lab."""

    counts = True

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self._ports = itertools.count(PORT)

    def started(
        self, command: list[str], layout: Layout, env: dict[str, str]
    ) -> AbstractContextManager[Team]:
        """Start ``command`` on every rank; see ``Runner``."""
        own = {**env, "MASTER_PORT": str(next(self._ports))}
        team: AbstractContextManager[Team] = self.lab.started([sys.executable, *command], env=own)
        return team

    def shape(self, rate: int | None) -> None:
        """Set the rate of every link; see ``Runner``."""
        self.lab.shape(Rates(link=rate))


@contextmanager
def network(layout: Layout, loopback: bool) -> Iterator[Runner]:
    """Yield a runner whose links have no limit yet."""
    if loopback:
        yield Loopback()
        return
    from lab.cluster import Lab

    with Lab(Nodes.parse(layout.lab)) as lab:
        yield InLab(lab)


def environment(folder: str) -> dict[str, str]:
    """Return every rank's environment: this checkout first, extensions in ``folder``."""
    path = os.pathsep.join(
        part for part in (str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")) if part
    )
    return {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": folder, "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def parse(status: int, output: str) -> Steps:
    """Return the steps that a worker printed. Raises CellError with the line that explains it."""
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


def free_port() -> str:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def steps_of(statuses: Sequence[int], outputs: Sequence[str]) -> list[Steps]:
    """Return the steps of an ended job's ranks. Raises CellError with the first failure."""
    first = [status not in (0, STOPPED) for status in statuses]
    order = sorted(range(len(first)), key=lambda rank: not first[rank])
    found = {rank: parse(statuses[rank], outputs[rank]) for rank in order}
    return [found[rank] for rank in range(len(first))]
