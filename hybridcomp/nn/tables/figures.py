"""Report what the caches of all tables do: a row ``embed`` of the session's reports."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import astuple

import torch

from hybridcomp.nn.tables.slots import RowTable
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.session.followers import FollowerBase


class TableFigures(FollowerBase):
    """Follower of a session: hits, asked rows, rows copied in and out, over the ranks of tables."""

    name = "embed"

    def __init__(self) -> None:
        self._told: weakref.WeakKeyDictionary[RowTable, torch.Tensor]
        self._told = weakref.WeakKeyDictionary()
        self.tables: weakref.WeakSet[RowTable] = weakref.WeakSet()

    def row(self) -> Mapping[str, float] | None:
        """Return the figures since the last call; a collective over the ranks of each table."""
        found = torch.zeros(4, dtype=torch.int64)
        for table in sorted(self.tables, key=lambda one: one.owners.number):
            now = torch.tensor(astuple(table.slots.figures))
            interval = now - self._told.get(table, 0)
            self._told[table] = now
            found += table.owners.total(interval)
        asked, hits, rows_in, rows_out = found.tolist()
        if not asked:
            return None
        return {"hits": hits / asked, "asked": asked, "rows_in": rows_in, "rows_out": rows_out}


def follow(table: RowTable) -> None:
    """Have the session of this process, where it has one, report ``table``."""
    found = None if process.known() is None else process.session()
    if found is None or (table in (known := _of(found)).tables):
        return
    known.tables.add(table)


def _of(found: EngineSession) -> TableFigures:
    """Return the follower of a session; adds it at the first call."""
    for follower in found.followers:
        if isinstance(follower, TableFigures):
            return follower
    made = TableFigures()
    found.follow(made)
    return made
