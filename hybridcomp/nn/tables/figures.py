"""Report the counters of all tables' caches as the row ``embed`` of a session's reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

import torch

from hybridcomp.channels.known_groups import exists
from hybridcomp.job.gates import Ranks
from hybridcomp.nn.tables.owners import Owners
from hybridcomp.nn.tables.slots import CacheFigures, RowTable
from hybridcomp.session import process
from hybridcomp.session.followers import FollowerBase


class TableFigures(FollowerBase):
    """Follower that sums cache hits, requested rows and rows copied in and out over all ranks."""

    name = "embed"

    def __init__(self) -> None:
        #: by the ranks that share tables: one table's owners, and all tables' counters. They
        #: outlive the tables, since a rank may free a deleted one later than the others
        self._tables: dict[Ranks, tuple[Owners, dict[int, CacheFigures]]] = {}
        self._told: dict[Ranks, torch.Tensor] = {}

    def add(self, table: RowTable) -> None:
        """Report ``table``, too; harmless when called twice."""
        _, counters = self._tables.setdefault(table.owners.members, (table.owners, {}))
        counters[id(table.slots.figures)] = table.slots.figures

    def row(self) -> Mapping[str, float] | None:
        """Return the figures since the last call; a collective over each group that has tables."""
        counts = torch.zeros(4, dtype=torch.int64, device="cpu")
        for ranks, (owners, counters) in sorted(self._tables.items(), key=lambda one: one[0]):
            if owners.ranks > 1 and not exists(owners.group):
                continue
            now = torch.tensor([astuple(one) for one in counters.values()], device="cpu").sum(0)
            counts += owners.total(now - self._told.get(ranks, 0))
            self._told[ranks] = now
        asked, hits, rows_in, rows_out = counts.tolist()
        if not asked:
            return None
        return {"hits": hits / asked, "asked": asked, "rows_in": rows_in, "rows_out": rows_out}


def follow(table: RowTable) -> None:
    """Have the session of this process, if it has one, report ``table``."""
    session = None if process.known() is None else process.session()
    if session is None:
        return
    figures = next((f for f in session.followers if isinstance(f, TableFigures)), None)
    if figures is None:
        figures = TableFigures()
        session.follow(figures)
    figures.add(table)
