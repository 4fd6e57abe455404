#!/usr/bin/env python3
"""Time the start of a job of many ranks through a real rendezvous store, with pretended ranks.

    python scripts/bench/bench_start.py --ranks 8 64 256 1024 4096

Every rank of a job states its block and versions, its process, its node, its groups, and whether
its files can be written, and reads what all have stated: five rounds through torch's TCPStore. Here
all ranks make these requests one after the other over one connection. The first row is the CPU time
of all requests on both sides, so more than the process that holds the store has to serve. What a
rank does with an answer, which all ranks do at once, counts for that rank alone.

Then one rank begins a session as an engine does, with the others' statements made up: it agrees,
names its parameters and finds the nodes of all ranks. Left out are torch's own subgroups, of
which a rank connects in its own two; their number is printed.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridcomp.collectives import topology
from hybridcomp.collectives.hierarchical import discovery
from hybridcomp.collectives.hierarchical.units import grid_of
from hybridcomp.config import CompressionConfig
from hybridcomp.job import agreement
from hybridcomp.job.statements import StatementRound
from hybridcomp.session.engine_session import EngineSession

#: ranks of a host, parameters of the model
PER_HOST, PARAMETERS = 8, 400
ME = 3
BLOCK = {"preset": "recommended"}


class Timed:
    """A store that adds up the CPU seconds of its requests, on both sides: it is in this process.

    So other programs of the machine do not count.
    """

    def __init__(self, store: Any) -> None:
        self._store, self.seconds = store, 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def timed(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.process_time() - start

        return timed


class Store:
    """A store that counts requests, and makes up what other ranks state once this one does."""

    def __init__(self, store: Any, ranks: int) -> None:
        self._store, self._ranks = store, ranks
        self.requests, self.made_up_s = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.requests += 1
            return method(*arguments)

        return counted if callable(method) else method

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value; after this rank's statement those of the others, which count as stated."""
        self.requests += 1
        self._store.set(key, value)
        prefix, _, last = key.rpartition("/")
        if last == str(ME) and "/all" not in prefix:
            start = time.perf_counter()
            others = [rank for rank in range(self._ranks) if rank != ME]
            texts = [as_rank(json.loads(value), rank) for rank in others]
            self._store.multi_set([f"{prefix}/{rank}" for rank in others], texts)
            self._store.add(f"{prefix}/stated", self._ranks - 1)
            self.made_up_s += time.perf_counter() - start


def as_rank(statement: dict[str, Any], rank: int) -> str:
    """Return what ``rank`` would state where this rank makes ``statement``."""
    if "rank" in statement:
        statement.update(rank=rank, pid=10_000 + rank, space=f"host {rank // PER_HOST}")
    if "host" in statement:
        statement["host"] = f"host {rank // PER_HOST}"
    if "groups" in statement and rank:
        statement["groups"] = []
    return json.dumps(statement, sort_keys=True)


def statements(rank: int, ranks: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what ``rank`` states at a start, round by round; ``settings``: block and versions."""
    host = f"node-{rank // PER_HOST}.cluster.example"
    place = {"rank": rank, "host": host, "space": f"boot {rank // PER_HOST}", "pid": rank}
    return [
        settings,
        {**place, "began": str(1000 + rank)},
        {"CROSS_RANK": None, "GROUP_RANK": str(rank // PER_HOST), "host": host},
        {"groups": [list(range(ranks))] if rank == 0 else [], "alive": True},
        {"problem": None},
    ]


def served(store: Any, ranks: int) -> dict[str, float]:
    """Return the seconds in which the store serves all ranks, of one rank, and of the last."""
    store = Timed(store)
    settings = {**CompressionConfig.parse(BLOCK).flat(), **agreement.versions("deepspeed")}
    said = [statements(rank, ranks, settings) for rank in range(ranks)]
    own = [0.0] * ranks
    for number in range(len(said[0])):
        rounds = [
            StatementRound(store, f"{ranks}/{number}", rank, range(ranks)) for rank in range(ranks)
        ]
        for this in rounds:
            start = time.perf_counter()
            this.state(json.dumps(said[this.rank][number], sort_keys=True))
            own[this.rank] += time.perf_counter() - start
        for this in rounds:
            start = time.perf_counter()
            assert this.is_told(10.0)
            this.read()
            own[this.rank] += time.perf_counter() - start
    return {
        "CPU of all requests": store.seconds,
        "one rank": statistics.median(own),
        "last rank": own[-1],
    }


@contextmanager
def one_rank(store: Store, ranks: int) -> Iterator[None]:
    """Have this process be rank ME of ``ranks``, whose subgroups are not made."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = sys.excepthook
    dist.init_process_group("fake", rank=ME, world_size=ranks, store=FakeStore())
    sys.excepthook = before
    whole = dist.group.WORLD
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for patch in (
            mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
            mock.patch.object(topology, "_group", lambda members: whole),
            mock.patch.object(discovery, "_host", lambda: f"host {ME // PER_HOST}"),
            mock.patch.object(agreement, "scopes", [agreement.Scope()]),
        ):
            stack.enter_context(patch)
        yield


def begun(store: Any, ranks: int) -> dict[str, float]:
    """Return the seconds and requests of one rank that begins a session among ``ranks``."""
    asked = Store(dist.PrefixStore(f"session {ranks}", store), ranks)  # type: ignore[attr-defined]
    parameters = [
        (f"layer.{i}.weight", torch.nn.Parameter(torch.zeros(4))) for i in range(PARAMETERS)
    ]
    block = CompressionConfig.parse(BLOCK)
    with one_rank(asked, ranks):
        start = time.perf_counter()
        session = EngineSession.begin(block, torch.device("cpu"))
        assert session is not None
        session.name_parameters(parameters)
        session.place([tuple(range(ranks))])
        seconds = time.perf_counter() - start - asked.made_up_s
        assert session.channels.nodes is not None
        grid = grid_of(session.channels.nodes.of_rank)
        subgroups = 0 if grid is None else len(grid) + PER_HOST
        session.close()
    return {"session": seconds, "requests": asked.requests, "subgroups": subgroups}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(ranks: int) -> dict[str, float]:
    """Return all figures of a job of ``ranks``."""
    minute = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", free_port(), None, True, minute, wait_for_workers=False)
    return {**served(store, ranks), **begun(store, ranks)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    asked = parser.parse_args(argv)
    if min(asked.ranks) < PER_HOST:
        parser.error(f"--ranks: expected {PER_HOST} or more, found {min(asked.ranks)}")
    found = {ranks: measure(ranks) for ranks in asked.ranks}
    print(f"{'ms of a start, by ranks':28}" + "".join(f"{ranks:>10,}" for ranks in found))
    for name in next(iter(found.values())):
        scale = 1 if name in ("requests", "subgroups") else 1000
        cells = "".join(f"{scale * figures[name]:10,.1f}" for figures in found.values())
        print(f"{name:28}{cells}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
