"""The cache of rows: hits compared with LRU and Belady, prefetched rows, evictions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hybridcomp.nn.tables import slots as slots_module
from hybridcomp.nn.tables.host_rows import HostRows
from hybridcomp.nn.tables.slots import RowSlots
from tests.nn.tables.made import zipf
from tests.selection import by_day

Counts = npt.NDArray[np.float64]


def host_of(rows: int) -> HostRows:
    host = HostRows(rows, None)
    host.add("weight", (2,), torch.float32)
    host.fill(lambda values, ids: values.copy_(ids[:, None] + torch.tensor([0.0, 0.5])), 0, 1)
    return host


def made(rows: int, count: int, frequency: Tensor | None = None) -> RowSlots:
    return RowSlots(host_of(rows), count, torch.device("cpu"), frequency)


def change(slots: RowSlots, rows: Tensor) -> None:
    """Add 100 to ``rows``."""
    at = slots.hold(rows, is_asked=False)
    slots.update(at, {"weight": slots.values["weight"][at] + 100})


def hits_of(order: str, batches: list[Tensor], rows: int, count: int, uses: Tensor) -> float:
    """Return the hit rate of unique rows by LRU, or by furthest next use (Belady)."""
    resident, key = torch.zeros(rows, dtype=torch.bool), torch.full((rows,), -1.0)
    following = torch.full((rows,), float("inf"))
    nexts: list[Tensor] = []
    for number in range(len(batches) - 1, -1, -1):
        nexts.insert(0, following[batches[number]].clone())
        following[batches[number]] = number
    if order == "belady":
        resident[torch.topk(uses, count).indices] = True
    hits = asked = 0
    for number, batch in enumerate(batches):
        have = resident[batch]
        hits, asked = hits + int(have.sum()), asked + len(batch)
        if order == "belady":
            following[batch] = nexts[number]
        lacking = int((~have).sum()) - (count - int(resident.sum()))
        if lacking > 0:
            evictable = resident.nonzero().flatten()
            evictable = evictable[~torch.isin(evictable, batch)]
            rank = -following[evictable] if order == "belady" else key[evictable]
            resident[evictable[torch.topk(rank, lacking, largest=False).indices]] = False
        resident[batch] = True
        key[batch] = number
    return hits / asked


def hits_of_ours(batches: list[Tensor], rows: int, count: int, uses: Tensor | None) -> float:
    cache = made(rows, count, uses)
    ahead = [cache.read_ahead(batch) for batch in batches[:4]]
    for number, batch in enumerate(batches):
        if number + 4 < len(batches):
            ahead.append(cache.read_ahead(batches[number + 4]))
        cache.hold(batch, ahead[number])
    return cache.figures.hit_rate


@pytest.mark.parametrize(("law", "least"), [(1.05, 0.0), (1.2, 0.60)])
@pytest.mark.parametrize(
    ("rows", "tokens"),
    by_day([(200_000, 2_000), (1_000_000, 4_096), (1_000_000, 16_384), (5_000_000, 32_768)],
           [(200_000, 2_000)]),
)  # fmt: skip
def test_hits_are_near_the_best_and_above_lru(
    rows: int, tokens: int, law: float, least: float
) -> None:
    """1.5 % of the rows are resident; statistics of the first half, measured on the second."""
    every = [zipf(rows, tokens, seed, law) for seed in range(60)]
    uses = torch.bincount(torch.cat(every[:30]), minlength=rows).float()
    batches, count = [torch.unique(ids) for ids in every[30:]], rows * 3 // 200
    ours = hits_of_ours(batches, rows, count, uses)
    lru, best = (hits_of(name, batches, rows, count, uses) for name in ("lru", "belady"))
    assert ours > least and ours > best - 0.065 and ours > lru + 0.09, (ours, lru, best)
    assert rows > 200_000 or hits_of_ours(batches, rows, count, None) > 0.3


def test_a_row_written_since_it_was_read_ahead_is_read_again() -> None:
    cache = made(100, 4)
    change(cache, torch.tensor([1, 2]))
    ahead = cache.read_ahead(torch.tensor([1, 50]))
    assert ahead.missing.tolist() == [50]
    later = cache.read_ahead(torch.tensor([60, 61]))
    later.values.result()
    change(cache, torch.tensor([60, 61]))
    change(cache, torch.tensor([70, 71, 72, 73]))  # writes 60 and 61 back, though they are soon
    at = cache.hold(torch.tensor([60, 61]), later)
    assert cache.values["weight"][at, 0].tolist() == [160, 161]
    at = cache.hold(torch.tensor([1, 50]), ahead)
    assert cache.values["weight"][at, 0].tolist() == [101, 50]
    cache.flush()
    weight = cache.host.states["weight"]
    assert weight[[1, 2, 50, 60, 73], 0].tolist() == [101, 102, 50, 160, 173]


def test_rows_ahead_and_rows_whose_step_is_to_come_are_evicted_last() -> None:
    cache = made(100, 6)
    cache.hold(torch.tensor([1, 2, 3]))
    cache.hold(torch.tensor([3, 4]))
    cache.read_ahead(torch.tensor([1]))
    cache.keep(torch.tensor([2]))
    cache.hold(torch.tensor([10, 11, 12, 13]))  # room for two: 3 and 4 go
    asked, hits = cache.figures.asked, cache.figures.hits
    cache.hold(torch.tensor([1, 2]))
    assert (cache.figures.asked, cache.figures.hits) == (asked + 2, hits + 2)
    cache.release()
    cache.hold(torch.arange(20, 26))  # takes all slots all the same
    assert cache.figures.rows_in == 3 + 1 + 4 + 6


def test_frequent_rows_are_there_at_once_and_counts_are_halved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses = torch.zeros(50)
    uses[[7, 9, 30]] = torch.tensor([5.0, 3.0, 9.0])
    cache = made(50, 2, uses)
    cache.hold(torch.tensor([7, 30]))
    assert cache.figures.hits == 2
    monkeypatch.setattr(slots_module, "HALVED_AFTER", 4)
    counted = made(50, 2)
    for _ in range(3):
        counted.hold(torch.tensor([1]))
    counted.hold(torch.tensor([2]))  # halves the three of row 1
    for _ in range(2):
        counted.hold(torch.tensor([2]))
    counted.hold(torch.tensor([3]))
    counted.hold(torch.tensor([2]))
    assert counted.figures.rows_in == 3, "row 1 went, which was asked for more often long ago"


def test_moves_to_another_device_dtype_and_back() -> None:
    cache = made(10, 4)
    change(cache, torch.tensor([1]))
    cache.to(torch.device("cpu"))
    cache.reload()
    assert cache.values["weight"][cache.hold(torch.tensor([1])), 0].tolist() == [1]
    cache.close()
