"""Residuals: bookkeeping over buckets, restarts, loss scales and changed numbers of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridcomp.channels.error_feedback import Piece, Residuals, cut

LIKE = torch.zeros(0)
A, B, C = Piece("a", 0, 5), Piece("b", 0, 3), Piece("c", 0, 4)


def filled(residuals: Residuals, pieces: list[Piece], start: float = 1.0) -> torch.Tensor:
    flat = residuals.get("sender", pieces, 2, LIKE)
    flat.copy_(torch.arange(flat.numel()) + start)
    return flat


def test_same_pieces_same_tensor() -> None:
    residuals = Residuals()
    flat = filled(residuals, [A, B])
    assert residuals.get("sender", [A, B], 2, LIKE) is flat
    assert residuals.nbytes == 8 * 4
    owner = residuals.get("owner", [A, B], 2, LIKE)
    assert owner is not flat and not owner.any()


def test_other_bucket_takes_over_and_leaves_nothing_behind() -> None:
    residuals = Residuals()
    flat = filled(residuals, [A, B])
    total = float(flat.sum())
    other = residuals.get("sender", [Piece("b", 1, 2), C, Piece("a", 2, 3)], 2, LIKE)
    assert other.tolist() == [7.0, 8.0, 0, 0, 0, 0, 3.0, 4.0, 5.0]
    assert float(flat.sum() + other.sum()) == total


def test_padding_has_no_memory() -> None:
    residuals = Residuals()
    filled(residuals, [Piece("", 0, 4), B])
    assert residuals.get("sender", [Piece("", 0, 2), B], 2, LIKE).tolist() == [0, 0, 5, 6, 7]
    assert "" not in residuals.state_dict()["sender"]


def test_scale_drop_norm() -> None:
    residuals = Residuals()
    flat = filled(residuals, [B])
    residuals.scale(0.5)
    assert flat.tolist() == [0.5, 1.0, 1.5]
    assert residuals.norm() == pytest.approx(3.5**0.5)
    residuals.drop()
    assert residuals.norm() == 0.0


def test_same_rank_restarts_exactly() -> None:
    old = Residuals()
    filled(old, [A, B])
    old.get("owner", [Piece("a", 2, 3)], 2, LIKE).fill_(7)
    new = Residuals()
    new.load(old.state_dict())
    state = new.state_dict()  # saved again before it was used: nothing is lost
    assert [o for o, _ in state["sender"]["a"]] == [0]
    assert new.get("sender", [A, B], 2, LIKE).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert new.get("owner", [Piece("a", 2, 3)], 2, LIKE).tolist() == [7, 7, 7]
    assert not new.get("owner", [Piece("a", 0, 2)], 2, LIKE).any()


def test_saved_in_two_hops_and_resumed_in_one_loses_nothing() -> None:
    """A GPU takes two hops between two ranks, a CPU one: the owner's share is still missing."""
    old = Residuals()
    filled(old, [A, B])
    old.get("owner", [Piece("a", 2, 3)], 2, LIKE).fill_(7)
    new = Residuals()
    new.load(old.state_dict())
    assert new.get("sender", [A, B], 2, LIKE, last=True).tolist() == [1, 2, 10, 11, 12, 6, 7, 8]
    assert not new.get("owner", [Piece("a", 2, 3)], 2, LIKE).any()  # applied only once


@given(
    old_ranks=st.integers(1, 4),
    new_ranks=st.integers(1, 4),
    values=st.lists(st.integers(-100, 100), min_size=64, max_size=64),
)
def test_sum_survives_another_number_of_ranks(
    old_ranks: int, new_ranks: int, values: list[int]
) -> None:
    states = []
    total = torch.zeros(8)
    for rank in range(old_ranks):
        residuals = Residuals()
        flat = residuals.get("sender", [A, B], old_ranks, LIKE)
        flat.copy_(torch.tensor(values[rank * 8 : rank * 8 + 8]).float())
        owner = residuals.get("owner", [Piece("a", rank, 1)], old_ranks, LIKE)
        owner.fill_(values[-1 - rank])
        total += flat
        total[rank] += owner[0]
        states.append(residuals.state_dict())
    found = torch.zeros(8)
    for _ in range(new_ranks):
        residuals = Residuals()
        residuals.load_sum(states)
        found += residuals.get("sender", [B, A], new_ranks, LIKE)[[3, 4, 5, 6, 7, 0, 1, 2]]
    torch.testing.assert_close(found, total)


def test_cut() -> None:
    assert cut([A, B, C], 3, 9) == [Piece("a", 3, 2), Piece("b", 0, 3), Piece("c", 0, 1)]
    assert cut([Piece("a", 10, 5)], 1, 3) == [Piece("a", 11, 2)]
    assert cut([A], 5, 5) == []
