"""A running lab: build it, run commands on its ranks, read what they sent, tear it down."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab import namespaces
from lab.layout import (
    Layout,
    Rates,
    environment,
    fill,
    link_ends,
    pinning,
    shaping,
    show_rate,
    unshaping,
    wiring,
)
from lab.namespaces import Traffic
from lab.team import STOPPED, Team, sigterm_raises

Per = Literal["rank", "node"]
#: ranks whose output is printed while they run
Echo = Literal["none", "first", "all"]


@dataclass(frozen=True)
class Result:
    """Result of one command on all ranks (or nodes)."""

    statuses: tuple[int, ...]  # by rank; above 128: 128 + the signal
    seconds: tuple[float, ...]
    outputs: tuple[str, ...]  # stdout and stderr
    traffic: tuple[Traffic, ...]  # of the interface of each node

    @property
    def status(self) -> int:
        """Return the status of the first rank that failed by itself, 0 when all went well."""
        failed = [status for status in self.statuses if status]
        return next((s for s in failed if s != STOPPED), failed[0] if failed else 0)


class Lab:
    """A cluster of network namespaces; a context manager.

    Removed on every exit: the end of the ``with`` body, an exception, SIGINT, SIGTERM and SIGHUP.
    After a SIGKILL the next lab removes what was left. Raises LabError where none can be built.
    """

    def __init__(
        self,
        layout: Layout,
        rates: Rates | None = None,
        *,
        mtu: int = 1500,
        cores: Sequence[int] | None = None,
    ) -> None:
        """``cores``: dealt out to the ranks; default: all that this process may use."""
        self.layout = layout
        self.rates = rates or Rates()
        self.mtu = mtu
        self.cores = sorted(cores if cores is not None else os.sched_getaffinity(0))
        self.prefix = namespaces.own_prefix()
        self._stack = ExitStack()

    @property
    def names(self) -> list[str]:
        """Return the namespaces of the nodes."""
        return [f"{self.prefix}n{node}" for node in range(self.layout.nodes)]

    def __enter__(self) -> Lab:
        namespaces.check_machine()
        namespaces.sweep()
        with ExitStack() as stack:
            stack.enter_context(sigterm_raises())
            stack.callback(self._remove)
            for words in wiring(self.layout, self.rates, self.prefix, self.mtu):
                namespaces.command(words)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _remove(self) -> None:
        """End what runs inside and remove the namespaces."""
        mine = [name for name in namespaces.present() if name.startswith(self.prefix)]
        namespaces.remove(mine)

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the traffic of every node's interface since the lab was built."""
        return tuple(namespaces.counters(name) for name in self.names)

    def run(
        self, command: Sequence[str], *, per: Per = "rank", timeout: float = 600.0,
        echo: Echo = "none",
    ) -> Result:  # fmt: skip
        """Run ``command`` on every rank, or once on every node, and wait.

        If a rank fails, the other ranks get GRACE_S seconds to end.
        """
        before = self.traffic()
        with self.started(command, per=per, echo=echo) as team:
            team.wait(timeout)
        traffic = tuple(now - then for now, then in zip(self.traffic(), before, strict=True))
        return Result(tuple(team.statuses), tuple(team.seconds), tuple(team.texts), traffic)

    @contextmanager
    def started(
        self, command: Sequence[str], *, per: Per = "rank", env: Mapping[str, str] | None = None,
        echo: Echo = "none",
    ) -> Iterator[Team]:  # fmt: skip
        """Start ``command`` on every rank, or once on every node; kill it after the body.

        Fills in the placeholders of ``layout.fill`` and sets the variables of
        ``layout.environment``, then those of ``env``; OMP_NUM_THREADS is 1 unless the environment
        sets it. Jobs side by side need a MASTER_PORT each.
        """
        cores, ranks = pinning(self.layout, self.cores), self.layout.ranks
        alone = len(self.cores) >= self.layout.world_size
        with tempfile.TemporaryDirectory(prefix="hclab") as folder:
            hostfile = Path(folder, "hostfile")
            hosts = [f"node{node} slots={ranks}\n" for node in range(self.layout.nodes)]
            hostfile.write_text("".join(hosts))
            team = Team()
            try:
                for node, name in enumerate(self.names):
                    first = node * ranks
                    together = sorted({core for row in cores[first:][:ranks] for core in row})
                    for local in [None] if per == "node" else range(ranks):
                        variables = {"OMP_NUM_THREADS": "1", **os.environ}
                        variables.update(environment(self.layout, node, local), **(env or {}))
                        own = together if local is None else cores[first + local]
                        label = f"node {node}" if local is None else f"rank {first + local}"
                        shown = echo == "all" or (echo == "first" and node == 0 and not local)
                        team.start(
                            fill(command, self.layout, node, str(hostfile)),
                            namespaces.entry(name, f"node{node}", own, alone),
                            variables,
                            f"[{label}] " if shown else None,
                        )
                yield team
            finally:
                team.end()

    def shape(self, rates: Rates) -> None:
        """Change link rates while ranks run; drops packets queued in front of a changed link."""
        before = link_ends(self.layout, self.rates, self.prefix)
        now = link_ends(self.layout, rates, self.prefix)
        for (namespace, interface, old), (_, _, new) in zip(before, now, strict=True):
            commands = [] if old is None else unshaping(namespace, interface)
            commands += [] if new is None else shaping(namespace, interface, new)
            for words in commands if old != new else ():
                namespaces.command(words)
        self.rates = rates

    def table(self, result: Result) -> str:
        """Tabulate what every node sent, how busy its link was and how its ranks ended."""
        rows = [
            f"{'node':<6}{'ranks':<12}{'link':>9}{'sent MB':>11}{'recv. MB':>11}{'s':>8}  status"
        ]
        share = len(result.statuses) // self.layout.nodes
        for node, traffic in enumerate(result.traffic):
            part = slice(node * share, (node + 1) * share)
            first, last = node * self.layout.ranks, (node + 1) * self.layout.ranks - 1
            rows.append(
                f"{node:<6}{f'{first}-{last}' if last > first else first!s:<12}"
                f"{show_rate(self.rates.of(node)):>9}{traffic.sent / 1e6:>11.2f}"
                f"{traffic.received / 1e6:>11.2f}{max(result.seconds[part]):>8.1f}  "
                f"{' '.join(map(str, result.statuses[part]))}"
            )
        return "\n".join(rows)
