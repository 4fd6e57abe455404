"""Run a cell on the nodes of a lab (scripts/netlab.py), or over loopback."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import one_gpu
from benchmarks.training_bench.cells import SCRIPTS, Layout
from lab.cluster import Lab
from lab.layout import PORT, Rates
from lab.layout import Layout as Nodes
from lab.namespaces import end_with_parent
from lab.team import STOPPED, Team

Steps = list[dict[str, float]]


class CellError(RuntimeError):
    """A training failed; the message is the log line that explains it."""


class Loopback:
    """All ranks on this machine without rate limits; needs no root."""

    counts = False  # whether only the ranks use the interface

    @contextmanager
    def started(self, command: list[str], layout: Layout, env: dict[str, str]) -> Iterator[Team]:
        """Start ``command`` (after the interpreter) on every rank; kill it after the body."""
        ranks, team, port = layout.nodes * layout.per_node, Team(), one_gpu.free_port()
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
                team.start([sys.executable, *command], end_with_parent, variables, None)
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
        """Start ``command`` (after the interpreter) on every rank; kill it after the body."""
        own = {**env, "MASTER_PORT": str(next(self._ports))}
        team: AbstractContextManager[Team] = self.lab.started([sys.executable, *command], env=own)
        return team

    def shape(self, rate: int | None) -> None:
        """Set the rate of every node's link in bits per second, None: no limit."""
        self.lab.shape(Rates(link=rate))


Runner = Loopback | InLab


@contextmanager
def network(layout: Layout, loopback: bool) -> Iterator[Runner]:
    """Yield a runner whose links have no limit yet."""
    if loopback:
        yield Loopback()
        return
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


def check(statuses: Sequence[int], outputs: Sequence[str]) -> None:
    """Raise CellError with the line that explains why a rank failed, if one did."""
    failed = [rank for rank, status in enumerate(statuses) if status]
    if not failed:
        return
    rank = min(failed, key=lambda rank: statuses[rank] == STOPPED)
    lines = [line for line in outputs[rank].splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
    said = (errors or lines or ["nothing was printed"])[-1]
    raise CellError(f"status {statuses[rank]}: {said.strip()[:300]}")
