"""Stretches: blocks of tensors in flat coordinates, pieces of them, and who publishes what."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridcomp.publishing.weight_ranges import WeightRange, divide, stretch_of_block


@given(st.data())
def test_a_block_is_found_again_in_the_flat_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    offset = [data.draw(st.integers(0, size - 1)) for size in shape]
    local = [data.draw(st.integers(1, n - at)) for n, at in zip(shape, offset, strict=True)]
    whole = torch.arange(math.prod(shape)).view(shape)
    block = whole[tuple(slice(a, a + n) for a, n in zip(offset, local, strict=True))]
    found = stretch_of_block("w", shape, offset, local)
    if found is None:
        assert sum(n != size for n, size in zip(local, shape, strict=True)) > 1
        return
    assert torch.equal(found.of(whole.view(-1)).reshape(-1), block.reshape(-1))
    assert torch.equal(found.offsets(torch.arange(found.numel)), block.reshape(-1))
    assert found.end == int(block.max()) + 1


@given(
    st.integers(1, 9), st.integers(1, 6), st.integers(0, 4), st.integers(1, 30), st.integers(0, 3)
)
def test_pieces_are_all_values_in_order(
    length: int, runs: int, gap: int, limit: int, start: int
) -> None:
    stretch = WeightRange("w", start, length, runs, length + gap if runs > 1 else 0)
    flat = torch.arange(stretch.end)
    pieces = list(stretch.pieces(limit))
    assert all(high - low <= limit for low, high in pieces)
    parts = [stretch.cut(low, high) for low, high in pieces]
    assert torch.equal(
        torch.cat([part.of(flat).reshape(-1) for part in parts]), stretch.of(flat).reshape(-1)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_value_has_one_owner_and_replicas_share_the_work(count: int) -> None:
    rows = WeightRange("rows", 2, 3, 7, 10)
    common = [WeightRange("a", 0, 11), WeightRange("b", 0, 5), rows]
    held = [[*common, WeightRange(f"own{rank}", 0, 4)] for rank in range(count)]
    held[0].append(WeightRange("empty", 0, 0))
    seen = []
    for place in range(count):
        owned = divide(held, place)
        parts = [held[place][n].cut(low, high) for n, low, high in owned]
        seen += parts
        shared = sum(part.numel for part in parts if not part.name.startswith("own"))
        assert abs(shared - 37 / count) <= 4  # 37 values are shared, and rows stay whole
    names = [part.name for part in seen]
    assert all(names.count(f"own{rank}") == 1 for rank in range(count))
    for whole in common:
        flat = torch.zeros(whole.end, dtype=torch.int64)
        for part in (part for part in seen if part.name == whole.name):
            part.of(flat).add_(1)
        assert bool((whole.of(flat) == 1).all()) and int(flat.sum()) == whole.numel
