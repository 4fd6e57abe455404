"""Stochastic rounding: mean error, correlation between ranks, repetitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import BlockInt
from tests.codecs import arrays

NUMEL = 100_000
BITS = (2, 3, 4, 5, 8)


def errors_of(codec: BlockInt, values: Tensor) -> Tensor:
    return arrays.decoded(codec, values).double() - values.double()


def normal(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def messages() -> dict[str, Tensor]:
    """Return messages with meaningful mean errors, each of NUMEL values."""
    constant = torch.full((NUMEL,), 0.3)
    constant[::32] = 1.0  # the scale of every block
    small = normal(2) * 0.01
    small[::32] = 1.0  # below half a step, which rounding to nearest never sends
    return {
        "fp32": normal(0),
        "born bf16": normal(1).bfloat16().float(),
        "bf16": normal(1).bfloat16(),
        "constant": constant,
        "small": small,
        "positive": normal(3).abs(),
    }


def z_score(errors: Tensor) -> float:
    """Return the mean in units of its standard error."""
    mean, spread = float(errors.mean()), float(errors.std())
    if spread < 1e-12:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / (spread / math.sqrt(errors.numel()))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", sorted(messages()))
def test_the_mean_error_is_zero(name: str, bits: int) -> None:
    values = messages()[name]
    errors = errors_of(BlockInt(bits, rounding="random"), values)
    assert float(errors.abs().max()) > 0
    assert abs(z_score(errors)) < 4
    # also for values on one side of zero only, and weighted by the values
    assert abs(z_score(errors[values > 0])) < 4
    assert abs(z_score(errors * values.double())) < 4


def test_to_nearest_the_same_values_have_another_mean() -> None:
    """Rounding to nearest is biased for the constants and drops the small values."""
    values = messages()
    for name in ("constant", "small"):
        errors = errors_of(BlockInt(4), values[name])
        assert abs(z_score((errors * values[name].double())[errors != 0])) > 40, name
    small = values["small"].clone()
    small[::32] = 0
    assert not arrays.decoded(BlockInt(4), values["small"])[small != 0].any()
    arrived = arrays.decoded(BlockInt(4, rounding="random"), values["small"])[small != 0]
    assert 0.03 < float((arrived != 0).float().mean()) < 0.08  # 0.8 % of 7 steps


@pytest.mark.parametrize("bits", BITS)
def test_it_is_as_likely_to_round_up_as_the_value_is_far(bits: int) -> None:
    """Values at one position between two levels, in every tenth of a step."""
    top = 2 ** (bits - 1) - 1
    for tenth in range(1, 10):
        values = torch.full((NUMEL,), tenth / 10 / top)
        values += normal(tenth) * 1e-4 / top
        values[::32] = 1.0
        up = arrays.decoded(BlockInt(bits, rounding="random"), values) > 0
        share = float(up[values < 1].float().mean())
        assert abs(share - tenth / 10) < 4 * 0.5 / math.sqrt(NUMEL)


@pytest.mark.parametrize("bits", BITS)
def test_the_errors_of_two_ranks_have_nothing_in_common(bits: int) -> None:
    """Values that differ in their last place, a bit of bf16, or altogether."""
    codec, first = BlockInt(bits, rounding="random"), normal(5)
    last = (first.view(torch.int32) ^ 1).view(torch.float32)
    near = (first.bfloat16().view(torch.int16) ^ 1).view(torch.bfloat16).float()
    pairs = ((first, normal(6)), (first, last), (first.bfloat16().float(), near), (first, -first))
    for one, other in pairs:
        a, b = errors_of(codec, one), errors_of(codec, other)
        # as noise: the correlation of error and position between levels is zero in the mean
        common = float((a * b).mean() / (a.std() * b.std()))
        assert abs(common) < 4 / math.sqrt(NUMEL), common


def test_blocks_of_one_message_have_nothing_in_common() -> None:
    """The same block repeated: each copy is rounded differently."""
    errors = errors_of(BlockInt(4, rounding="random"), normal(7, 32).repeat(NUMEL // 32))
    rows = errors.view(-1, 32)
    for apart in (1, 2, 32, 64):
        a, b = rows[:-apart].flatten(), rows[apart:].flatten()
        assert abs(float((a * b).mean() / (a.std() * b.std()))) < 4 / math.sqrt(a.numel())
    assert abs(z_score(errors)) < 4


def test_levels_stay_in_range_next_to_the_top() -> None:
    """A value at or just below its block's top never rounds to a level beyond."""
    for bits in BITS:
        top = torch.tensor([1.0, 1.0 - 2.0**-24, 1.0625 - 2.0**-20]).repeat(8000)
        for values in (top, -top, top * 2.0**-100, top * 3e38):
            decoded = arrays.decoded(BlockInt(bits, rounding="random"), values)
            assert not (decoded.sign() * values.sign() < 0).any()
            assert float(decoded.abs().max()) <= 1.0626 * float(values.abs().max())


def test_values_on_a_level_and_zeros_stay_there() -> None:
    levels = torch.arange(-7, 8).float().repeat(200)
    levels[::15] = 0.0
    levels[1::30] = 7.0
    for block in torch.split(levels, 32):
        block[0] = 7.0  # T is 7, so the step is 1
    assert torch.equal(arrays.decoded(BlockInt(4, rounding="random"), levels), levels)
