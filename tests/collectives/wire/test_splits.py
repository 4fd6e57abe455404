"""Split sizes are read once: cached by their list, never stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridcomp.collectives.wire import splits as module
from hybridcomp.collectives.wire.splits import Splits


def test_a_list_that_comes_back_is_not_read_again() -> None:
    given = [3, 0, 5]
    found = Splits.of(given, 4)
    assert found.numels == [12, 0, 20] and (found.total, found.least, found.each) == (32, 0, 0)
    assert Splits.of(given, 4) is found and Splits.of(found) is found
    assert Splits.of(given) is not found and Splits.of(given).numels == given
    given[1] = 7
    assert Splits.of(given, 4).numels == [12, 28, 20]


def test_lists_at_one_address_are_told_apart() -> None:
    seen = set()
    for index in range(100):  # Python reuses the address of a freed list
        given = [index, 1]
        seen.add(id(given))
        assert Splits.of(given).numels == [index, 1]
        del given
    assert len(seen) < 100


@pytest.mark.parametrize("wrong", [[1.5, 2], ["1", 2], [1 << 70, 0]], ids=["float", "str", "large"])
def test_what_is_no_length_is_an_error(wrong: list[Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        Splits.of(wrong)


@pytest.mark.parametrize("wrong", [([1 << 62], 4), ([1 << 62, 1 << 62], 1)], ids=["row", "sum"])
def test_lengths_beyond_64_bits_are_an_error(wrong: tuple[list[int], int]) -> None:
    with pytest.raises(OverflowError, match="64 bits"):
        Splits.of(*wrong)


def test_few_lists_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_known", {})
    kept = [[index] for index in range(module.MOST_KNOWN + 5)]
    first = Splits.of(kept[0])
    for given in kept[1:]:
        Splits.of(given)
    assert len(module._known) == module.MOST_KNOWN
    assert Splits.of(kept[0]) is not first  # evicted, and read again
    assert Splits.of(range(4)).numels == [0, 1, 2, 3]
    tensors: list[Any] = [torch.tensor(5), torch.tensor(2)]  # torch accepts them as lengths, too
    assert Splits.of(tensors).numels == [5, 2]
    assert len(module._known) == module.MOST_KNOWN


def test_what_goes_to_other_ranks_and_nodes() -> None:
    assert Splits.even(6, 4) is Splits.even(6, 4)
    assert Splits.even(6, 4).beyond[1, frozenset({2, 3})] == (18, 12)
    uneven = Splits([1, 2, 4, 8])
    for _ in range(2):  # the second time as remembered, for each rank and each set of nodes
        assert uneven.beyond[1, frozenset({2, 3})] == (13, 12)
        assert uneven.beyond[3, frozenset()] == (7, 0)
        assert uneven.beyond[3, frozenset({0})] == (7, 1)
    assert Splits.even(6, 4).each == 6 and Splits.of([6, 5]).each == 0
