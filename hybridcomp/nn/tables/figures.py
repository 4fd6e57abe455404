"""Report the counters of all tables' caches as the row ``embed`` of a session's reports."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import astuple

import torch

from hybridcomp.nn.tables.slots import RowTable
from hybridcomp.session import process
from hybridcomp.session.followers import FollowerBase


class TableFigures(FollowerBase):
    """Follower that sums cache hits, requested rows and rows copied in and out over all ranks."""

    name = "embed"

    def __init__(self) -> None:
        self._told: weakref.WeakKeyDictionary[RowTable, torch.Tensor]
        self._told = weakref.WeakKeyDictionary()
        self.tables: weakref.WeakSet[RowTable] = weakref.WeakSet()

    def row(self) -> Mapping[str, float] | None:
        """Return the figures since the last call; a collective over the ranks of each table."""
        counts = torch.zeros(4, dtype=torch.int64, device="cpu")
        for table in sorted(self.tables, key=lambda t: (t.owners.number, t.owners.members)):
            now = torch.tensor(astuple(table.slots.figures), device="cpu")
            interval = now - self._told.get(table, 0)
            self._told[table] = now
            counts += table.owners.total(interval)
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
    figures.tables.add(table)
