"""Low-bit residuals: bytes, rounding, views, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.codecs.quantized_residual import (
    BLOCK,
    QuantizedResidual,
    as_fp32,
    is_state,
    nbytes_of,
    split,
    squares,
    zeros,
)
from hybridcomp.codecs.residual_runs import ALL, joined, runs

FEW = (4, 8, 16)
TOP = {4: 7, 8: 127}
NUMELS = (1, 31, 32, 33, 1000, 1024, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def left_out(numel: int, seed: int = 0) -> Tensor:
    """Return values of many magnitudes, and whole blocks of zeros."""
    torch.manual_seed(seed)
    values = torch.randn(numel) * torch.exp(3 * torch.randn(numel))
    values[64:96] = 0.0
    return values


def absmax_of(values: Tensor) -> Tensor:
    """Return for each value the absmax of its block."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.abs().amax(1).repeat_interleave(BLOCK)[: values.numel()]


def most(values: Tensor, bits: int) -> Tensor:
    """Return the error bound: half a step, of a block for integers, of the value for bf16."""
    if bits == 16:
        return values.abs() * 2.0**-8 + 1e-38
    return 0.5001 * 1.004 * absmax_of(values) / TOP[bits] + 2.0**-126


@pytest.mark.parametrize("bits", FEW)
def test_off_by_half_a_step_at_most(bits: int) -> None:
    for numel in NUMELS:
        values = left_out(numel)
        kept = QuantizedResidual.of(values, bits)
        again = kept.unpack()
        assert bool(((again - values).abs() <= most(values, bits)).all())
        assert kept.nbytes == nbytes_of(bits, numel)


@pytest.mark.parametrize("bits", FEW)
def test_packed_again_it_keeps_its_bits(bits: int) -> None:
    for seed in range(20):
        kept = QuantizedResidual.of(left_out(3000, seed), bits)
        assert torch.equal(QuantizedResidual.of(kept.unpack(), bits)._data, kept._data)


@pytest.mark.parametrize("bits", FEW)
def test_extremes_stay_finite(bits: int) -> None:
    inf, nan, largest = float("inf"), float("nan"), torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, inf, -inf, nan, 1.0, 0.0, 1e-42])
    kept = QuantizedResidual.of(values, bits)
    again = kept.unpack()
    assert bool(again.isfinite().all()) and again[2:5].tolist() == [0, 0, 0]
    assert torch.allclose(again[:2], values[:2], rtol=4e-3)
    tiny = QuantizedResidual.of(torch.tensor([1e-42, 3e-38]), bits).unpack()
    assert torch.allclose(tiny, torch.tensor([0.0, 3e-38]), rtol=0, atol=2.0**-127)
    kept.mul_(1e30)
    assert bool(kept.unpack().isfinite().all())


def test_memory_is_as_documented() -> None:
    for bits, nbytes in ((32, 4.0), (16, 2.0), (8, 1.0625), (4, 0.5625)):
        assert zeros(bits, 1 << 16, torch.device("cpu")).nbytes == nbytes * (1 << 16)


@pytest.mark.parametrize("bits", FEW)
def test_views(bits: int) -> None:
    kept = QuantizedResidual.of(left_out(500), bits)
    whole = kept.unpack()
    for low, high in ((0, 500), (0, 32), (32, 500), (5, 11), (31, 33), (40, 40), (63, 500)):
        view = kept[low:high]
        assert len(view) == view.numel() == high - low
        assert torch.equal(view.unpack(), whole[low:high])
        into = torch.empty(high - low)
        assert view.unpack(into) is into
        assert torch.equal(into, whole[low:high])
        assert torch.equal(view.clone().unpack(), whole[low:high])
        view.pack(whole[low:high])
        assert torch.equal(kept.unpack(), whole), "neighbours in the same blocks stay"
    first, second = (as_fp32(one) for one in split(kept, [37, 463]))
    assert torch.equal(torch.cat([first, second]), whole)
    assert float(squares(kept[3:450])) == pytest.approx(float(whole[3:450].double().square().sum()))


def test_which_views_are_one() -> None:
    kept = QuantizedResidual.of(left_out(500), 8)
    for numels, until in (([32, 64, 404], 500), ([40, 24, 30, 0, 2, 404], 500), ([40, 24, 30], 94)):
        found = joined(
            [one for i, one in enumerate(split(kept, numels)) if numels[i] not in (24, 2)]
        )
        assert found is not None and torch.equal(found.unpack(), kept[:until].unpack())
    apart = QuantizedResidual.of(left_out(500), 8)
    for parts in ([kept[:30], kept[30:]], [kept[5:32], kept[32:]], [kept[:32], apart[32:]]):
        assert joined(parts) is None
    assert joined([kept[:32], kept[32:].unpack()]) is None and joined([torch.zeros(3)]) is None


@pytest.mark.parametrize("bits", FEW)
@pytest.mark.parametrize("borders", [(64, 160, 288), (64, 75, 90, 160, 170), (5, 6, 7, 8, 400)])
def test_a_run_is_its_parts_one_after_the_other(bits: int, borders: tuple[int, ...]) -> None:
    edges = [*borders, 500]
    numels = [high - low for low, high in zip([0, *edges], edges, strict=False)]
    one, other = (QuantizedResidual.of(left_out(500), bits) for _ in range(2))
    (run,) = runs(split(one, numels), 500)
    parts = [other[low:high] for low, high in zip([0, *edges], edges, strict=False)]
    for view, part in zip(run.unpack(), parts, strict=True):
        assert torch.equal(view, part.unpack())
    run.pack(left_out(500, 1))
    new = torch.split(left_out(500, 1), numels)
    for values, part in zip(new, parts, strict=True):
        part.pack(values)
    assert torch.equal(one._data, other._data)
    for inner in runs(split(one, numels)[1:-1], ALL):
        inner.zero_()
    for part in parts[1:-1]:
        part.zero_()
    assert torch.equal(one._data, other._data)


def test_runs_end_between_blocks_and_with_their_residual() -> None:
    kept, other = (QuantizedResidual.of(left_out(500), 8) for _ in range(2))
    parts = [kept[:64], kept[64:70], kept[70:100], kept[128:160], kept[192:], other[:9]]
    found = [[(part.start, part.stop) for part in run.parts] for run in runs(parts, 80)]
    assert found == [[(0, 64), (64, 70), (70, 100)], [(128, 160)], [(192, 500)], [(0, 9)]]
    assert [len(run.parts) for run in runs(parts, 64)] == [1, 2, 1, 1, 1]
    assert not list(runs([torch.zeros(3)], 80))


@pytest.mark.parametrize("bits", FEW)
def test_writing_a_view_moves_neighbours_by_half_a_step_at_most(bits: int) -> None:
    kept = QuantizedResidual.of(left_out(200), bits)
    before = kept.unpack()
    kept[10:70].pack(torch.full((60,), 1e3))
    after = kept.unpack()
    assert torch.allclose(after[10:70], torch.tensor(1e3), rtol=4e-3)
    assert bool(((after - before).abs() <= most(after, bits))[:10].all())
    assert torch.equal(after[96:], before[96:]), "other blocks are not touched"
    kept[10:70].zero_()
    assert not kept[10:70].unpack().any()
    kept[40:50].add_(torch.full((10,), 2.0))
    assert torch.allclose(kept[40:50].unpack(), torch.tensor(2.0), rtol=4e-3)


@pytest.mark.parametrize("bits", FEW)
def test_scaling(bits: int) -> None:
    kept = QuantizedResidual.of(left_out(1000), bits)
    before = kept.unpack()
    kept.mul_(0.25)
    assert torch.equal(kept.unpack(), 0.25 * before), "powers of two, as loss scales are, are exact"
    kept.mul_(4 * 1.7)
    assert bool(((kept.unpack() - 1.7 * before).abs() <= most(1.7 * before, bits)).all())


@pytest.mark.parametrize("bits", FEW)
def test_a_checkpoint_holds_the_bits(bits: int) -> None:
    kept = QuantizedResidual.of(left_out(500), bits)
    for low, high in ((0, 500), (5, 11), (63, 470)):
        state = kept[low:high].state()
        assert is_state(state)
        read = QuantizedResidual.from_state(state)
        assert torch.equal(read.unpack(), kept[low:high].unpack())
        assert state["data"].numel() <= nbytes_of(bits, high - low) + 2 * nbytes_of(bits, BLOCK)


def test_damage_is_noticed() -> None:
    good = QuantizedResidual.of(left_out(100), 8).state()
    wrong: list[dict[str, Any]] = [
        {"bits": 7}, {"bits": 4}, {"numel": 99999}, {"numel": -1}, {"start": 32}, {"start": 1.0},
        {"data": good["data"][:-1]}, {"data": good["data"].float()}, {"data": None}, {"more": 1},
    ]  # fmt: skip
    assert is_state(good)
    for change in wrong:
        assert not is_state({**good, **change}), change
    infinite = good["data"].clone()
    infinite[-1] = 0x7F | 0x80
    assert not is_state({**good, "data": infinite})
    assert not is_state({key: good[key] for key in ("bits", "start", "numel")})
    assert not is_state(None)


@pytest.mark.parametrize("bits", FEW)
@pytest.mark.parametrize(
    "codec",
    [
        BlockInt(2),
        BlockInt(4),
        BlockInt(8),
        BlockInt(3, True),
        BlockInt(4, levels="gaussian"),
        BlockInt(4, levels="lloyd"),
        BlockInt(4, True, "lloyd"),
    ],
    ids=str,
)
def test_one_pass_writes_what_two_do(codec: BlockInt, bits: int) -> None:
    """Encoding with the residual in one pass gives the bits of separate passes."""
    for dtype in DTYPES:
        for numel in (5, 1024, 4100):
            values = left_out(numel, 1).clamp(-1e4, 1e4).to(dtype)
            kept = QuantizedResidual.of(0.1 * left_out(numel, 2), bits)
            sums = kept.unpack() + values.float()
            payload = torch.empty(codec.wire_nbytes(numel, torch.float32), dtype=torch.uint8)
            assert codec.encode_kept(values, kept, payload)
            expected = torch.empty_like(payload)
            codec.encode(sums, expected)
            assert torch.equal(payload, expected)
            decoded = torch.empty(numel)
            codec.decode(payload, decoded)
            assert torch.equal(kept._data, QuantizedResidual.of(sums - decoded, bits)._data)


def test_a_view_inside_of_blocks_takes_two_passes() -> None:
    kept = QuantizedResidual.of(left_out(100), 8)
    payload = torch.empty(1000, dtype=torch.uint8)
    before = kept.unpack()
    assert not BlockInt(4).encode_kept(torch.ones(40), kept[8:48], payload)
    assert not BlockInt(4).encode_kept(torch.ones(40), kept[32:72], payload)
    assert torch.equal(kept.unpack(), before)


def test_an_overflow_leaves_nothing() -> None:
    for bits in FEW:
        kept = QuantizedResidual.of(torch.ones(64), bits)
        values = torch.ones(64)
        values[40] = float("inf")
        payload = torch.empty(BlockInt(4).wire_nbytes(64, torch.float32), dtype=torch.uint8)
        assert BlockInt(4).encode_kept(values, kept, payload)
        assert not kept[32:].unpack().any()
