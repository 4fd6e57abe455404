"""Low-rank reductions against a float64 oracle, and through a channel's three reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.residuals.error_feedback import Residuals
from hybridcomp.channels.residuals.low_rank import (
    Factored,
    Factors,
    all_reduce,
    reduce_scatter,
    reduce_to_owners,
)
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs import PowerSgd
from hybridcomp.collectives import Group, Meter, OwnedRange, Transfer
from hybridcomp.collectives.low_rank import Matrix
from hybridcomp.collectives.wire.handle import Pending
from tests.collectives.calls import low_rank_sum
from tests.collectives.common import digest, values_of
from tests.ranks import RunRanks

Array = npt.NDArray[np.float64]
RANKS, RANK, STEPS = 3, 2, 4
#: 5 values, 12 x 20, 3 values, 30 x 9, 7 values
MATRICES = (Matrix("a", 5, 12, 20), Matrix("b", 248, 30, 9))
NUMEL = 525
OUTSIDE = [*range(5), *range(245, 248), *range(518, 525)]


def low_rank_values(rank: int, step: int) -> Tensor:
    """Return matrices with a common two-dimensional row space: their sum has rank 2."""
    values = values_of(rank, NUMEL, seed=step)
    for number, matrix in enumerate(MATRICES):
        shared = values_of(number, RANK * matrix.columns, seed=50).view(RANK, matrix.columns)
        own = values_of(rank, matrix.rows * RANK, seed=step + 9).view(matrix.rows, RANK)
        matrix.of(values).copy_(own @ shared)
    return values


def _run(kind: str, steps: int) -> list[tuple[Tensor, Tensor, int]]:
    """Return (sum, residual, bytes sent) of every step."""
    me, residual, warm = dist.get_rank(), torch.zeros(NUMEL), dict[str, Tensor]()
    found = []
    for step in range(steps):
        values = low_rank_values(me, step) if kind == "low" else values_of(me, NUMEL, seed=step)
        if kind == "tiny":
            values *= 1e-30
        if kind == "nan" and step == 1 and me == 1:
            values[MATRICES[0].start + 17] = float("nan")
        if kind == "zero":
            values.zero_()
        meter = Meter()
        total = low_rank_sum(
            values, MATRICES, RANK, None, meter=meter, residual=residual, warm=warm
        )
        result = Pending(total, meter, False).wait()
        found.append((result, residual.clone(), meter.wire_nbytes))
    return found


def _starts() -> dict[str, Tensor]:
    """Return the random right factors of the first step."""
    residual, warm = torch.zeros(NUMEL), dict[str, Tensor]()
    steps = low_rank_sum(torch.zeros(NUMEL), MATRICES, RANK, None, residual=residual, warm=warm)
    next(steps).wait()
    return warm


def oracle(starts: dict[str, Tensor]) -> tuple[list[Array], list[list[Array]]]:
    """Return sums and residuals of every step in float64."""
    rights = {key: start.double().numpy() for key, start in starts.items()}
    residuals = [np.zeros(NUMEL) for _ in range(RANKS)]
    sums, left = [], []
    for step in range(STEPS):
        sent = [
            values_of(rank, NUMEL, seed=step).double().numpy() + residuals[rank]
            for rank in range(RANKS)
        ]
        total, residuals = np.sum(sent, axis=0), [np.zeros(NUMEL) for _ in range(RANKS)]
        for matrix in MATRICES:
            here, shape = slice(matrix.start, matrix.stop), (matrix.rows, matrix.columns)
            basis, _ = np.linalg.qr(total[here].reshape(shape) @ rights[matrix.key])
            right = total[here].reshape(shape).T @ basis
            for rank in range(RANKS):
                own = sent[rank][here].reshape(shape)
                residuals[rank][here] = (own - basis @ (basis.T @ own)).reshape(-1)
            total[here] = (basis @ right.T).reshape(-1)
            rights[matrix.key], _ = np.linalg.qr(right)
        sums.append(total)
        left.append(residuals)
    return sums, left


def test_sums_and_residuals_are_those_of_the_oracle(on_ranks: RunRanks) -> None:
    starts = on_ranks(RANKS, _starts)
    assert len({digest(*(start.reshape(-1) for start in s.values())) for s in starts}) == 1, (
        "a start differs between ranks"
    )
    by_rank = on_ranks(RANKS, _run, "any", STEPS)
    sums, residuals = oracle(starts[0])
    first = sum(m.rows for m in MATRICES) * RANK + len(OUTSIDE)
    second = sum(m.columns for m in MATRICES) * RANK
    rings = sum(2 * (RANKS - 1) * numel * 4 // RANKS for numel in (first, second))
    assert {sent for found in by_rank for *_, sent in found} == {rings}
    for step in range(STEPS):
        results = [found[step][0] for found in by_rank]
        assert len({digest(result) for result in results}) == 1, "replicas differ"
        np.testing.assert_allclose(results[0].double(), sums[step], atol=2e-4)
        for rank in range(RANKS):
            left = by_rank[rank][step][1]
            np.testing.assert_allclose(left.double(), residuals[step][rank], atol=2e-4)
            assert not left[OUTSIDE].any()
        exact = sum(values_of(rank, NUMEL, seed=step) for rank in range(RANKS))
        torch.testing.assert_close(results[0][OUTSIDE], exact[OUTSIDE])  # type: ignore[index]


def test_what_has_the_rank_arrives_exactly(on_ranks: RunRanks) -> None:
    by_rank = on_ranks(RANKS, _run, "low", 2)
    for step in range(2):
        exact = sum(low_rank_values(rank, step).double() for rank in range(RANKS))
        left = sum(found[step][1].double() for found in by_rank)
        assert float((by_rank[0][step][0].double() - exact).norm() / exact.norm()) < 1e-5  # type: ignore[union-attr]
        assert float(left.norm() / exact.norm()) < 1e-5  # type: ignore[union-attr]


def test_tiny_and_zero_matrices(on_ranks: RunRanks) -> None:
    tiny = on_ranks(RANKS, _run, "tiny", 2)
    usual = on_ranks(RANKS, _run, "any", 2)
    for step in range(2):
        torch.testing.assert_close(tiny[0][step][0] * 1e30, usual[0][step][0], rtol=1e-4, atol=1e-4)
    for result, residual, _ in on_ranks(RANKS, _run, "zero", 2)[0]:
        assert not result.any() and not residual.any()


def test_nan_reaches_its_matrix_on_every_rank_and_is_gone_the_next_step(
    on_ranks: RunRanks,
) -> None:
    for found in on_ranks(RANKS, _run, "nan", 3):
        assert found[0][0].isfinite().all()
        lost, kept = (matrix.of(found[1][0]) for matrix in MATRICES)
        assert not lost.isfinite().any() and kept.isfinite().all()
        assert all(residual.isfinite().all() for _, residual, _ in found)
        assert found[2][0].isfinite().all()


def _surrounded() -> list[bool]:
    """Return whether sums under autocast have the same bits."""
    plain = _run("any", 2)
    with torch.autocast("cpu", torch.bfloat16):
        cast = _run("any", 2)
    return [
        torch.equal(one, two)
        for before, after in zip(plain, cast, strict=True)
        for one, two in zip(before[:2], after[:2], strict=True)
    ]


def test_a_backward_pass_under_autocast_changes_no_bit(on_ranks: RunRanks) -> None:
    assert all(all(found) for found in on_ranks(RANKS, _surrounded))


PIECES = (
    Piece("v", 0, 5),
    Piece("a", 0, 240),
    Piece("u", 0, 3),
    Piece("b", 0, 270),
    Piece("", 0, 7),
)


def place_of(shapes: dict[str, tuple[int, ...]]) -> Factored:
    factors = Factors()
    for name, shape in shapes.items():
        factors.learn(name, shape)
    return Factored(Residuals(), factors)


def via() -> Transfer:
    return Transfer(PowerSgd(RANK), Group.of(None), Meter())


def _place() -> Factored:
    return place_of({"v": (5,), "a": (12, 4, 5), "u": (3,), "b": (30, 9)})


def _three_ways(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
    me = dist.get_rank()
    values = values_of(me, NUMEL, dtype)
    whole = values.clone()
    all_reduce(whole, via(), _place(), PIECES, False).wait()
    ranges = [OwnedRange(0, 100, (0,)), OwnedRange(100, 300, (1, 2)), OwnedRange(300, 525, (2,))]
    cut = [Piece("v", 0, 5), Piece("a", 0, 95), Piece("a", 95, 145), *PIECES[2:]]
    owned = reduce_to_owners(values, ranges, via(), _place(), cut)
    shards = torch.split(values, [200, 200, 125])
    of_shards = [
        [Piece("v", 0, 5), Piece("a", 0, 195)],
        [Piece("a", 195, 45), Piece("u", 0, 3), Piece("b", 0, 152)],
        [Piece("b", 152, 118), Piece("", 0, 7)],
    ]
    scattered = reduce_scatter(shards, via(), _place(), of_shards, True).wait()
    return whole, owned, scattered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owners_and_shards_get_the_same_bits(on_ranks: RunRanks, dtype: torch.dtype) -> None:
    by_rank = on_ranks(RANKS, _three_ways, dtype)
    whole = by_rank[0][0]
    owned = [[(0, 100)], [(100, 300)], [(100, 300), (300, 525)]]
    shards = [(0, 200), (200, 400), (400, 525)]
    for rank, (reduced, sums, shard) in enumerate(by_rank):
        assert torch.equal(reduced, whole)
        for (start, stop), total in zip(owned[rank], sums, strict=True):
            assert torch.equal(total.to(dtype), whole[start:stop])
        assert torch.equal(shard.to(dtype), whole[slice(*shards[rank])])


def _resumed(stop_at: int | None) -> tuple[str, float]:
    me, place = dist.get_rank(), _place()
    outputs = []
    for step in range(STEPS):
        if step == stop_at:
            residuals, factors = place.residuals.state_dict(), place.factors.state_dict()
            place = _place()
            place.residuals.load(residuals)
            place.factors.load(factors)
        values = values_of(me, NUMEL, seed=step)
        all_reduce(values, via(), place, PIECES, False).wait()
        outputs.append(values)
    return digest(*outputs), place.residuals.norm()


def test_resuming_changes_no_bit(on_ranks: RunRanks) -> None:
    assert on_ranks(RANKS, _resumed, None) == on_ranks(RANKS, _resumed, 2)


def test_cut_parameters_are_matrices_as_far_as_their_rows_are_whole() -> None:
    factors = place_of({"w": (40, 50), "small": (3, 5), "v": (100,)}).factors
    pieces: list[Any] = [
        Piece("v", 0, 100), Piece("w", 130, 200), Piece("w", 330, 1000), Piece("small", 0, 15),
        Piece("w", 0, 130), Piece("w", 1330, 670),
    ]  # fmt: skip
    one, many = PowerSgd(1).low_rank, PowerSgd(20).low_rank
    assert one is not None and many is not None
    assert factors.matrices(pieces, one) == [
        # elements 150 to 1300 of w: rows 3 to 25
        Matrix("w[3:26]", 120, 23, 50),
        # too small to pay off: "small", and rows 0 and 1; then rows 27 to 39
        Matrix("w[27:40]", 100 + 1200 + 15 + 130 + 20, 13, 50),
    ]
    assert factors.matrices(pieces, many) == []


def test_without_pieces_everything_is_exact(on_ranks: RunRanks) -> None:
    exact = sum(values_of(rank, NUMEL) for rank in range(RANKS))
    for result in on_ranks(RANKS, _unknown):
        torch.testing.assert_close(result, exact)


def _unknown() -> Tensor:
    values = values_of(dist.get_rank(), NUMEL)
    all_reduce(values, via(), _place(), None, False).wait()
    return values
