"""A lab that runs: build it, run commands on its ranks, read what they sent, tear it down."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
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
from lab.team import STOPPED, Team

Per = Literal["rank", "node"]


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

    @property
    def sent(self) -> int:
        """Bytes that left all nodes."""
        return sum(part.sent for part in self.traffic)


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
        self._handlers: dict[signal.Signals, object] = {}

    @property
    def names(self) -> list[str]:
        """The namespaces of the nodes."""
        return [f"{self.prefix}n{node}" for node in range(self.layout.nodes)]

    def __enter__(self) -> Lab:
        namespaces.check_machine()
        namespaces.sweep()
        self._catch_signals()
        try:
            for words in wiring(self.layout, self.rates, self.prefix, self.mtu):
                namespaces.command(words)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs inside and remove the namespaces; may be called again."""
        try:
            mine = [name for name in namespaces.present() if name.startswith(self.prefix)]
            namespaces.remove(mine)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers.clear()

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the traffic of every node's interface since the lab was built."""
        return tuple(namespaces.counters(name) for name in self.names)

    def run(
        self,
        command: Sequence[str],
        *,
        per: Per = "rank",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 600.0,
        echo: Literal["none", "first", "all"] = "none",
    ) -> Result:
        """Run ``command`` on every rank, or once on every node, and wait.

        The placeholders of ``layout.fill`` and the variables of ``layout.environment`` are set;
        ``env`` comes on top, and OMP_NUM_THREADS is 1 unless somebody sets it. When a rank fails
        the others get GRACE_S. ``echo``: whose output is shown while it runs.
        """
        before = self.traffic()
        with self.started(command, per=per, env=env, cwd=cwd, echo=echo) as team:
            team.wait(timeout)
        traffic = tuple(now - then for now, then in zip(self.traffic(), before, strict=True))
        return Result(tuple(team.statuses), tuple(team.seconds), tuple(team.texts), traffic)

    @contextmanager
    def started(
        self,
        command: Sequence[str],
        *,
        per: Per = "rank",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        echo: Literal["none", "first", "all"] = "none",
    ) -> Iterator[Team]:
        """``command`` as ``run`` starts it, beside what else runs here.

        Whatever still runs at the end of the ``with`` body is killed. Jobs side by side need a
        MASTER_PORT each.
        """
        with tempfile.TemporaryDirectory(prefix="hclab") as folder:
            hostfile = Path(folder, "hostfile")
            hosts = [f"node{n} slots={self.layout.ranks}\n" for n in range(self.layout.nodes)]
            hostfile.write_text("".join(hosts))
            team = Team()
            try:
                self._start(team, command, per, env, cwd, str(hostfile), echo)
                yield team
            finally:
                team.end()

    def shape(self, rates: Rates) -> None:
        """Give the links other rates while ranks run; what waits in front of one is dropped."""
        before = link_ends(self.layout, self.rates, self.prefix)
        now = link_ends(self.layout, rates, self.prefix)
        for (namespace, interface, old), (_, _, new) in zip(before, now, strict=True):
            commands = [] if old is None else unshaping(namespace, interface)
            commands += [] if new is None else shaping(namespace, interface, new)
            for words in commands if old != new else ():
                namespaces.command(words)
        self.rates = rates

    def _start(
        self,
        team: Team,
        command: Sequence[str],
        per: Per,
        env: Mapping[str, str] | None,
        cwd: str | Path | None,
        hostfile: str,
        echo: Literal["none", "first", "all"],
    ) -> None:
        cores = pinning(self.layout, self.cores)
        alone = len(self.cores) >= self.layout.world_size
        for node, name in enumerate(self.names):
            first = node * self.layout.ranks
            together = sorted({core for row in cores[first:][: self.layout.ranks] for core in row})
            locals_: list[int | None] = [None] if per == "node" else [*range(self.layout.ranks)]
            for local in locals_:
                variables = {"OMP_NUM_THREADS": "1", **os.environ}
                variables.update(environment(self.layout, node, local), **(env or {}))
                own = together if local is None else cores[first + local]
                label = f"node {node}" if local is None else f"rank {first + local}"
                shown = echo == "all" or (echo == "first" and node == 0 and not local)
                team.start(
                    fill(command, self.layout, node, hostfile),
                    namespaces.entry(name, f"node{node}", own, alone),
                    variables,
                    cwd,
                    f"[{label}] " if shown else None,
                )

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

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; KeyboardInterrupt and SystemExit go there
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    """End as an exception, so that every ``finally`` runs."""
    raise SystemExit(128 + number)
