"""Cache the most requested rows on the device, and load the rows of each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp.nn.tables.host_rows import HostRows
from hybridcomp.nn.tables.owners import Owners

#: batches after which counts are halved, so that a table follows its data
HALVED_AFTER = 1 << 16
#: added to the counts of rows of prefetched batches, and of batches whose optimizer step is
#: pending; larger than any count
SOON = 1e30


class RowTable(Protocol):
    """A table as its checkpoints and reports see it."""

    name: str
    num_embeddings: int
    embedding_dim: int
    owners: Owners
    slots: RowSlots

    @property
    def host(self) -> HostRows:
        """This rank's rows and states on the host."""

    def reload(self) -> None:
        """Drop all rows on the device, since the rows on the host were replaced."""


@dataclass(eq=False)
class RowsAhead:
    """Rows of a prefetched batch; a thread reads those that were not resident.

    ``written``: rows written to the host since the read began, whose values here are stale.
    """

    rows: Tensor
    missing: Tensor
    values: Future[dict[str, Tensor]]
    written: list[Tensor] = field(default_factory=list)


@dataclass
class CacheFigures:
    """Count a cache's unique rows requested, hits among them, and rows copied in and out."""

    asked: int = 0
    hits: int = 0
    rows_in: int = 0
    rows_out: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the share of requested rows that were resident."""
        return self.hits / max(1, self.asked)

    def since(self, before: CacheFigures) -> CacheFigures:
        """Return the differences from earlier figures of the same cache."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return CacheFigures(*(now - then for now, then in pairs))


class RowSlots:
    """``count`` slots on ``device`` for rows of ``host``; a row that changed is written back.

    It evicts the least requested rows first, by ``frequency`` or by its own counts. It evicts rows
    of prefetched batches, and of batches whose optimizer step is pending, only if it must.
    """

    def __init__(
        self, host: HostRows, count: int, device: torch.device, frequency: Tensor | None
    ) -> None:
        """Read the most frequent rows; ``frequency``: of every row, (rows,), any number type."""
        self.host, self.count, self._device = host, count, device
        self.values: dict[str, Tensor] = {}
        for name in host.states:
            self.make(name)
        self._slot_of = torch.full((host.rows,), -1, dtype=torch.int32, device="cpu")
        self._row_in = torch.full((count,), -1, dtype=torch.int64, device="cpu")
        self._dirty = torch.zeros(count, dtype=torch.bool, device="cpu")
        self._counted, self._batches = frequency is None, 0
        uses = (
            torch.zeros(host.rows, dtype=torch.float32, device="cpu")
            if frequency is None
            else frequency.to(torch.float32)
        )
        self._uses = uses
        self._ahead: deque[RowsAhead] = deque()
        self._kept: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1, "hybridcomp rows")
        self.figures = CacheFigures()
        if frequency is not None and count:
            self.hold(torch.topk(uses, count).indices.sort().values, is_asked=False)

    def make(self, name: str) -> None:
        """Make the slots of the host's state ``name``, zeros like the state itself."""
        like = self.host.states[name]
        shape = (self.count, *like.shape[1:])
        self.values[name] = torch.zeros(shape, dtype=like.dtype, device=self._device)

    def to(self, device: torch.device) -> None:
        self._device = device
        self.values = {name: values.to(device) for name, values in self.values.items()}

    def read_ahead(self, rows: Tensor) -> RowsAhead:
        """Start reading the rows of ``rows`` (sorted, unique) that are not resident; ``hold`` takes
        the result."""
        missing = rows[self._slot_of[rows] < 0]
        made = RowsAhead(rows, missing, self._thread.submit(self.host.read, missing))
        self._ahead.append(made)
        return made

    def keep(self, rows: Tensor) -> None:
        """Protect ``rows`` from eviction until ``release``: their optimizer step is pending."""
        self._kept.append(rows)

    def release(self) -> None:
        """Allow the eviction of rows passed to ``keep``."""
        self._kept.clear()

    def hold(
        self, rows: Tensor, ahead: RowsAhead | None = None, *, is_asked: bool = True
    ) -> Tensor:
        """Load ``rows`` (sorted, unique, at most ``count``) and return their slots, int64.

        ``ahead``: their prefetched values. ``is_asked``: count them as requested.
        """
        if ahead is not None and ahead in self._ahead:
            self._ahead.remove(ahead)
        slots = self._slot_of[rows]
        missing = rows[slots < 0]
        if is_asked:
            self.figures.asked += len(rows)
            self.figures.hits += len(rows) - len(missing)
            self._count(rows)
        if len(missing):
            missing, values = self._read(missing, ahead)
            self._place(missing, values, self._free(len(missing), slots[slots >= 0]))
        return self._slot_of[rows].to(torch.int64)

    def update(self, slots: Tensor, values: dict[str, Tensor]) -> None:
        at = slots.to(self._device)
        for name, value in values.items():
            self.values[name].index_copy_(0, at, value)
        self._dirty[slots] = True

    def flush(self) -> None:
        """Write every row that changed to the host; all stay resident."""
        self._write(self._dirty.nonzero().flatten())

    def reload(self) -> None:
        """Drop all rows without writing them back: the host's rows were replaced."""
        self._ahead.clear()
        self.release()
        self._slot_of.fill_(-1)
        self._row_in.fill_(-1)
        self._dirty.zero_()

    def close(self) -> None:
        self._thread.shutdown()

    def _count(self, rows: Tensor) -> None:
        if not self._counted:
            return
        self._batches += 1
        if self._batches % HALVED_AFTER == 0:
            self._uses /= 2
        self._uses[rows] += 1

    def _read(self, missing: Tensor, ahead: RowsAhead | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows ``missing`` in some order, and their values, prefetched if possible."""
        if ahead is None:
            return missing, self.host.read(missing)
        values = ahead.values.result()
        is_good = torch.isin(ahead.missing, missing)
        for written in ahead.written:
            is_good &= ~torch.isin(ahead.missing, written)
        if bool(is_good.all()) and len(ahead.missing) == len(missing):
            return missing, values
        good = ahead.missing[is_good]
        others = missing[~torch.isin(missing, good)]
        more = self.host.read(others)
        at = is_good.nonzero().flatten()
        both = {name: torch.cat([values[name][at], more[name]]) for name in values}
        return torch.cat([good, others]), both

    def _place(self, rows: Tensor, values: dict[str, Tensor], slots: Tensor) -> None:
        at = slots.to(self._device)
        for name, value in values.items():
            there = value.to(self._device, non_blocking=True)
            self.values[name].index_copy_(0, at, there)
        self._slot_of[rows] = slots.to(torch.int32)
        self._row_in[slots] = rows
        self._dirty[slots] = False
        self.figures.rows_in += len(rows)

    def _free(self, count: int, needed: Tensor) -> Tensor:
        """Return ``count`` free slots; evict rows if needed, but none in the slots ``needed``."""
        free = (self._row_in < 0).nonzero().flatten()
        lacking = count - len(free)
        if lacking <= 0:
            return free[:count]
        order = self._uses[self._row_in.clamp(min=0)]
        for soon in self._soon():
            slots = self._slot_of[soon]
            order[slots[slots >= 0]] += SOON
        order[free] = float("inf")
        order[needed] = float("inf")
        out = torch.topk(order, lacking, largest=False).indices
        self._write(out[self._dirty[out]])
        self._slot_of[self._row_in[out]] = -1
        self._row_in[out] = -1
        return torch.cat([free, out])

    def _soon(self) -> Iterable[Tensor]:
        yield from (ahead.rows for ahead in self._ahead)
        yield from self._kept

    def _write(self, slots: Tensor) -> None:
        """Write the rows in ``slots`` to the host."""
        if not len(slots):
            return
        rows, at = self._row_in[slots], slots.to(self._device)
        self.host.write(rows, {name: v[at].cpu() for name, v in self.values.items()})
        for ahead in self._ahead:
            ahead.written.append(rows)
        self._dirty[slots] = False
        self.figures.rows_out += len(rows)
