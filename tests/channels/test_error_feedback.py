"""Residuals: bookkeeping over buckets, restarts, loss scales and changed numbers of ranks."""

from __future__ import annotations

import pytest
import torch

from hybridcomp.channels.error_feedback import Piece, Residuals, cut, held_in

LIKE = torch.zeros(0)
A, B, C = Piece("a", 0, 5), Piece("b", 0, 3), Piece("c", 0, 4)


def filled(residuals: Residuals, pieces: list[Piece], start: float = 1.0) -> torch.Tensor:
    flat = residuals.get("sender", pieces, LIKE)
    flat.copy_(torch.arange(flat.numel()) + start)
    return flat


def test_same_pieces_same_tensor() -> None:
    residuals = Residuals()
    flat = filled(residuals, [A, B])
    assert residuals.get("sender", [A, B], LIKE) is flat
    assert residuals.nbytes == 8 * 4
    owner = residuals.get("owner", [A, B], LIKE)
    assert owner is not flat and not owner.any()


def test_other_bucket_takes_over_and_leaves_nothing_behind() -> None:
    residuals = Residuals()
    flat = filled(residuals, [A, B])
    total = float(flat.sum())
    other = residuals.get("sender", [Piece("b", 1, 2), C, Piece("a", 2, 3)], LIKE)
    assert other.tolist() == [7.0, 8.0, 0, 0, 0, 0, 3.0, 4.0, 5.0]
    assert float(flat.sum() + other.sum()) == total


def test_padding_has_no_memory() -> None:
    residuals = Residuals()
    filled(residuals, [Piece("", 0, 4), B])
    assert residuals.get("sender", [Piece("", 0, 2), B], LIKE).tolist() == [0, 0, 5, 6, 7]
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
    old.get("owner", [Piece("a", 2, 3)], LIKE).fill_(7)
    new = Residuals()
    new.load(old.state_dict())
    state = new.state_dict()  # saved again before it was used: nothing is lost
    assert [o for o, _ in state["sender"]["a"]] == [0]
    assert new.get("sender", [A, B], LIKE).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert new.get("owner", [Piece("a", 2, 3)], LIKE).tolist() == [7, 7, 7]
    assert not new.get("owner", [Piece("a", 0, 2)], LIKE).any()


def test_saved_in_two_hops_and_resumed_in_one_loses_nothing() -> None:
    """A GPU takes two hops between two ranks, a CPU one: the owner's share is still missing."""
    old = Residuals()
    filled(old, [A, B])
    old.get("owner", [Piece("a", 2, 3)], LIKE).fill_(7)
    new = Residuals()
    new.load(old.state_dict())
    assert new.get("sender", [A, B], LIKE, last=True).tolist() == [1, 2, 10, 11, 12, 6, 7, 8]
    assert not new.get("owner", [Piece("a", 2, 3)], LIKE).any()  # applied only once


def test_saved_again_before_use_counts_once() -> None:
    """What the ranks of a node have in common is on all of them, and is one sum."""
    ranks = []
    for index in range(2):
        residuals = Residuals()
        residuals.add("a", (1, torch.tensor([1.0, 2, 3])), index, count=2)
        ranks.append(residuals)
    for _ in range(2):  # saved, loaded, saved
        states = [residuals.state_dict() for residuals in ranks]
        held = [one for state in states for one in held_in(state)]
        assert sum(float(values.sum()) for _, (_, values) in held) == 6
        for residuals, state in zip(ranks, states, strict=True):
            residuals.load(state)
    own = [ranks[0].get("sender", [Piece("a", 0, 3)], LIKE, message=[A]),
           ranks[1].get("sender", [Piece("a", 3, 2)], LIKE, message=[A])]  # fmt: skip
    assert [flat.tolist() for flat in own] == [[0, 1, 2], [3, 0]]
    for residuals in ranks:
        assert not residuals._common, "what the other rank has taken is not here any more"


def test_used_up_is_freed() -> None:
    residuals = Residuals()
    residuals.add("a", (0, torch.ones(5)))
    assert residuals.nbytes == 20
    residuals.get("sender", [Piece("a", 1, 3)], LIKE)
    assert residuals.nbytes == 20, "12 bytes moved, 8 are still to come"
    assert residuals.get("sender", [A], LIKE).tolist() == [1] * 5
    assert not residuals._restored


def test_a_flush_takes_what_the_owner_left_out_of_a_known_message() -> None:
    """The lossless step behind a fallback has one hop where the steps before had two."""
    residuals = Residuals()
    sender, owner = residuals.pair([A], [Piece("a", 3, 2)], LIKE)
    sender.fill_(1)
    owner.fill_(2)
    assert residuals.get("sender", [A], LIKE, last=True).tolist() == [1, 1, 1, 3, 3]
    assert not owner.any()


def test_an_owner_of_other_stretches_sends_what_it_no_longer_owns() -> None:
    residuals = Residuals()
    residuals.pair([A], [Piece("a", 3, 2)], LIKE)[1].fill_(2)
    sender, owner = residuals.pair([A, B], [Piece("a", 4, 1), B], LIKE)
    assert sender.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    assert owner.tolist() == [2, 0, 0, 0]


def test_cut() -> None:
    assert cut([A, B, C], 3, 9) == [Piece("a", 3, 2), Piece("b", 0, 3), Piece("c", 0, 1)]
    assert cut([Piece("a", 10, 5)], 1, 3) == [Piece("a", 11, 2)]
    assert cut([A], 5, 5) == []
