"""Residuals: bookkeeping over buckets, restarts, loss scales and changed numbers of ranks."""

from __future__ import annotations

import cProfile
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.channels.residuals.deferred_residuals import DeferredResiduals
from hybridcomp.channels.residuals.error_feedback import Residuals
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.channels.residuals.saved_residuals import Hop, are_residuals, held_in
from hybridcomp.codecs.quantized_residual import QuantizedResidual, as_fp32, nbytes_of

LIKE = torch.zeros(0)
A, B, C = Piece("a", 0, 5), Piece("b", 0, 3), Piece("c", 0, 4)


def fp32_of(residuals: Residuals, hop: Hop, pieces: list[Piece], *where: Any, **how: Any) -> Tensor:
    """Return the fp32 residual of ``pieces``."""
    return as_fp32(residuals.get(hop, pieces, *where, **how))


def pair_of(residuals: Residuals, *where: Any) -> tuple[Tensor, Tensor]:
    """Return both fp32 residuals of a two-hop reduction."""
    sender, owner = residuals.pair(*where)
    return as_fp32(sender), as_fp32(owner)


def filled(residuals: Residuals, pieces: list[Piece], start: float = 1.0) -> Tensor:
    flat = fp32_of(residuals, "sender", pieces, LIKE)
    flat.copy_(torch.arange(flat.numel()) + start)
    return flat


def test_same_pieces_same_tensor() -> None:
    residuals = Residuals()
    flat = filled(residuals, [A, B])
    assert fp32_of(residuals, "sender", [A, B], LIKE) is flat
    assert residuals.nbytes == 8 * 4
    owner = fp32_of(residuals, "owner", [A, B], LIKE)
    assert owner is not flat and not owner.any()


def many_ranks(ranks: int, names: str = "abc", chunk: int = 2) -> tuple[Piece, ...]:
    """Return all ranks' shards in order, each with a part of every parameter."""
    return tuple(Piece(name, chunk * rank, chunk) for rank in range(ranks) for name in names)


@pytest.mark.parametrize("bits", [32, 8])
def test_shards_of_many_ranks_take_over_as_one_tensor_would(bits: int) -> None:
    whole = [Piece(name, 0, 128) for name in "abc"]
    flat = torch.arange(1.0, 385)
    old, new = Residuals(bits), Residuals(bits)
    old.get("sender", whole, LIKE).add_(flat)
    kept = as_fp32(old.get("sender", whole, LIKE)).clone()
    new.load(old.state_dict())
    for residuals in (old, new):  # from a message that was split differently, and from a file
        found = as_fp32(residuals.get("sender", many_ranks(64), LIKE))
        by_rank = kept.view(3, 64, 2).transpose(0, 1).reshape(-1)
        torch.testing.assert_close(found, by_rank, rtol=0, atol=0 if bits == 32 else 4.0)
        assert not as_fp32(residuals.get("sender", whole[:1], LIKE)).equal(torch.zeros(128))
        assert not as_fp32(residuals.get("sender", many_ranks(64), LIKE))[:2].any(), "only once"


def test_a_checkpoint_has_a_tensor_for_each_parameter_however_many_ranks() -> None:
    residuals = Residuals()
    as_fp32(residuals.get("sender", many_ranks(64), LIKE)).copy_(torch.arange(384))
    state = residuals.state_dict()["sender"]
    assert {name: [offset for offset, _ in held] for name, held in state.items()} == {
        name: [0] for name in "abc"
    }
    by_rank = torch.arange(384.0).view(64, 3, 2)
    for index, name in enumerate("abc"):
        assert state[name][0][1].tolist() == by_rank[:, index].reshape(-1).tolist()


def test_a_first_message_of_many_ranks_takes_time_by_their_number_alone() -> None:
    """A pairwise comparison of pieces would take eight seconds at 256 ranks."""
    calls = []
    for ranks in (64, 512):
        residuals = Residuals()
        residuals.get("sender", tuple(reversed(many_ranks(ranks))), LIKE).add_(torch.tensor(1.0))
        pieces, profile = many_ranks(ranks), cProfile.Profile()
        with profile:
            residuals.get("sender", pieces, LIKE)
            residuals.pair(pieces, pieces[: ranks // 2], LIKE)
        calls.append(sum(one.callcount for one in profile.getstats()))
        with cProfile.Profile() as again:
            residuals.get("sender", pieces, LIKE)
        assert sum(one.callcount for one in again.getstats()) < 30, "a tuple that was met"
    assert calls[1] < 10 * calls[0]


def test_padding_has_no_memory() -> None:
    residuals = Residuals()
    filled(residuals, [Piece("", 0, 4), B])
    assert fp32_of(residuals, "sender", [Piece("", 0, 2), B], LIKE).tolist() == [0, 0, 5, 6, 7]
    assert "" not in residuals.state_dict()["sender"]


def test_same_rank_restarts_exactly() -> None:
    old = Residuals()
    filled(old, [A, B])
    fp32_of(old, "owner", [Piece("a", 2, 3)], LIKE).fill_(7)
    new = Residuals()
    new.load(old.state_dict())
    state = new.state_dict()  # saved again before use: nothing is lost
    assert [o for o, _ in state["sender"]["a"]] == [0]
    assert fp32_of(new, "sender", [A, B], LIKE).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert fp32_of(new, "owner", [Piece("a", 2, 3)], LIKE).tolist() == [7, 7, 7]
    assert not fp32_of(new, "owner", [Piece("a", 0, 2)], LIKE).any()


def test_saved_in_two_hops_and_resumed_in_one_loses_nothing() -> None:
    """A GPU uses two hops between two ranks, a CPU one: the owner's residual is still added."""
    old = Residuals()
    filled(old, [A, B])
    fp32_of(old, "owner", [Piece("a", 2, 3)], LIKE).fill_(7)
    new = Residuals()
    new.load(old.state_dict())
    assert fp32_of(new, "sender", [A, B], LIKE, last=True).tolist() == [1, 2, 10, 11, 12, 6, 7, 8]
    assert not fp32_of(new, "owner", [Piece("a", 2, 3)], LIKE).any()  # applied only once


def test_saved_again_before_use_counts_once() -> None:
    """Ranks of a node share a residual: each holds a copy, which counts as one sum."""
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
    own = [fp32_of(ranks[0], "sender", [Piece("a", 0, 3)], LIKE, message=[A]),
           fp32_of(ranks[1], "sender", [Piece("a", 3, 2)], LIKE, message=[A])]  # fmt: skip
    assert [flat.tolist() for flat in own] == [[0, 1, 2], [3, 0]]
    for residuals in ranks:
        assert not residuals._common, "what the other rank has taken is not here any more"


def test_used_up_is_freed() -> None:
    residuals = Residuals()
    residuals.add("a", (0, torch.ones(5)))
    assert residuals.nbytes == 20
    fp32_of(residuals, "sender", [Piece("a", 1, 3)], LIKE)
    assert residuals.nbytes == 20, "12 bytes moved, 8 are still to come"
    assert fp32_of(residuals, "sender", [A], LIKE).tolist() == [1] * 5
    assert not residuals._restored


def test_a_flush_takes_what_the_owner_left_out_of_a_known_message() -> None:
    """The lossless step of a fallback has one hop, the steps before it had two."""
    residuals = Residuals()
    sender, owner = pair_of(residuals, [A], [Piece("a", 3, 2)], LIKE)
    sender.fill_(1)
    owner.fill_(2)
    assert fp32_of(residuals, "sender", [A], LIKE, last=True).tolist() == [1, 1, 1, 3, 3]
    assert not owner.any()


def test_an_owner_of_other_stretches_sends_what_it_no_longer_owns() -> None:
    residuals = Residuals()
    pair_of(residuals, [A], [Piece("a", 3, 2)], LIKE)[1].fill_(2)
    sender, owner = pair_of(residuals, [A, B], [Piece("a", 4, 1), B], LIKE)
    assert sender.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    assert owner.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_few_bits_restart_exactly(bits: int) -> None:
    """Pieces that begin inside blocks keep the saved values and scales."""
    pieces = [Piece("a", 0, 45), Piece("", 0, 3), Piece("b", 7, 60), Piece("c", 0, 21)]
    old = Residuals(bits)
    flat = old.get("sender", pieces, LIKE)
    assert isinstance(flat, QuantizedResidual) and flat.numel() == 129
    assert old.nbytes == nbytes_of(bits, 129)
    values = torch.randn(129, generator=torch.Generator().manual_seed(0))
    values[45:48] = 0.0  # padding, which no state has
    flat.pack(values)
    for _ in range(2):  # saved, loaded, saved
        new = Residuals(bits)
        new.load(old.state_dict())
        old = new
    assert are_residuals(old.state_dict())
    assert torch.equal(fp32_of(old, "sender", pieces, LIKE), flat.unpack())
    for (name, (offset, held)), piece in zip(
        held_in(new.state_dict()), [p for p in pieces if p.name], strict=True
    ):
        assert (name, offset, len(held)) == (piece.name, piece.offset, piece.numel)


def test_bits_may_change_with_a_restart() -> None:
    wide = Residuals()
    filled(wide, [A, B])
    few = Residuals(8)
    few.load(wide.state_dict())
    read = fp32_of(few, "sender", [B, A], LIKE)
    assert torch.allclose(read, torch.tensor([6.0, 7, 8, 1, 2, 3, 4, 5]), atol=0.5 * 8.1 / 127)
    back = Residuals()
    back.load(few.state_dict())
    assert torch.equal(fp32_of(back, "sender", [B, A], LIKE), read)


@pytest.mark.parametrize("bits", [32, 8])
def test_scale_drop_and_move_to_another_bucket(bits: int) -> None:
    residuals = Residuals(bits)
    flat = residuals.get("sender", [A, B], LIKE)
    flat.add_(torch.arange(8.0))
    before = as_fp32(flat).clone()
    residuals.scale(0.5)
    assert torch.equal(as_fp32(flat), before / 2)
    assert residuals.norm() == pytest.approx(float(before.norm()) / 2)
    other = fp32_of(residuals, "sender", [Piece("b", 1, 2), C, Piece("a", 2, 3)], LIKE)
    moved = [3, 3.5, 0, 0, 0, 0, 1, 1.5, 2]
    assert torch.allclose(other, torch.tensor(moved), atol=0.03 if bits == 8 else 0)
    assert not as_fp32(flat)[[2, 3, 4, 6, 7]].any(), "applied only once"
    residuals.drop()
    assert residuals.norm() == 0.0
    residuals.clear()
    assert residuals.nbytes == 0


def test_withheld_few_bits_come_back() -> None:
    residuals = Residuals(8)
    flat = residuals.get("sender", [A, B], LIKE)
    assert isinstance(flat, QuantizedResidual)
    flat.pack(torch.arange(1.0, 9.0))
    before = flat.unpack()
    kept = DeferredResiduals({"a": torch.tensor(False), "b": torch.tensor(True)})
    kept.take(flat, [A, B])
    assert not flat.unpack()[:5].any()
    assert torch.allclose(flat.unpack()[5:], before[5:], atol=0.04)
    kept.give_back()
    assert torch.allclose(flat.unpack(), before, atol=0.04)


@pytest.mark.parametrize("bits", [32, 8])
def test_memory_of_messages_that_have_other_parameters_in_every_step(bits: int) -> None:
    """As with experts, which have no gradient without tokens: no value is lost or kept twice."""
    residuals, chosen = Residuals(bits), random.Random(0)
    names, numel = "abcdefgh", 64
    fixed = [Piece("always", 0, numel)]
    given = 0.0
    for step in range(60):
        used = [name for name in names if chosen.random() < 0.5] or ["a"]
        pieces = tuple(
            Piece(name, half * numel // 2, numel // 2) for half in (0, 1) for name in used
        )
        for message in (fixed, pieces):
            flat = residuals.get("sender", message, LIKE)
            added = torch.full((flat.numel(),), float(step % 5))
            flat.add_(added)
            given += float(added.sum())
        held = [one for _, one in held_in(residuals.state_dict())]
        total = sum(float(values.sum()) for _, values in held)
        # each addition may enlarge a block of equal values by up to 0.4 %
        assert total == pytest.approx(given, rel=1e-6 if bits == 32 else 0.1)
    whole = (len(names) + 1) * numel
    assert residuals.nbytes <= 3 * nbytes_of(bits, whole)
    assert len(residuals._known) <= len(residuals._stretches) <= 8
    assert fp32_of(residuals, "sender", fixed, LIKE).sum() > 0


def test_parameters_in_many_messages_are_not_taken_for_one_in_all_of_them() -> None:
    residuals = Residuals()
    for low in range(0, 50, 5):
        residuals.get("sender", [Piece("a", low, 5)], LIKE)
    assert len(residuals._stretches) == 10 and residuals.nbytes == 4 * 50
    for again in range(3):  # two alternating layouts, then a third for the rest
        residuals.get("sender", [Piece("a", 0, 25 + again), Piece("a", 25 + again, 25)], LIKE)
    assert residuals.nbytes <= 4 * 3 * 51


def test_cut() -> None:
    assert cut([A, B, C], 3, 9) == [Piece("a", 3, 2), Piece("b", 0, 3), Piece("c", 0, 1)]
    assert cut([Piece("a", 10, 5)], 1, 3) == [Piece("a", 11, 2)]
    assert cut([A], 5, 5) == []
