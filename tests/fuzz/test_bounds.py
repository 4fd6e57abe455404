"""Hostile values satisfy every bound: the short version of ``scripts/fuzz.py bounds``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fuzzing import bounds, hostile, promises
from hybridcomp.codecs import Bounded


def test_hostile_values_stay_within_every_bound(tmp_path: Path) -> None:
    result = bounds.hunt(12_000_000, seed=1, keep=tmp_path)
    assert result.outside == []
    assert len(result.tried) == 9  # three checks, three dtypes
    assert min(result.subnormal.values()) > 10_000 and len(result.subnormal) == 3


@pytest.mark.parametrize("bound", [0.1, 0.02, 0.006])
def test_small_fp16_values_stay_within_a_bound_when_moved(bound: float) -> None:
    """Half of the bound is for fp16's grid; without it errors reached 1.56 times the bound."""
    generator = torch.Generator().manual_seed(0)
    promise = Bounded(bound)
    for power in range(-24, -8):
        powers = torch.empty(4096).uniform_(-14, 0, generator=generator).exp()
        values = torch.randn(1 << 16, generator=generator) * powers.repeat_interleave(16)
        message = (values * 2.0**power).half()
        codec = promise.for_message(message.numel(), message.dtype, 1)
        decoded = promises.through(codec, message, message.dtype).double()
        limit = bound * hostile.absmax_of(message, message.numel(), promise.segment)
        limit = hostile.spread(limit, message.numel(), promise.segment)
        assert bool(((decoded - message.double()).abs() <= limit).all())


@pytest.mark.parametrize("numel", [4097, 70_001, 5])
@pytest.mark.parametrize(("family", "block"), [("zfp", 4), ("blockint", 32)])
def test_a_nan_takes_its_block_with_it_and_nothing_else(
    family: str, block: int, numel: int
) -> None:
    """A message's last block is shorter; the fuzzer once counted its neighbours as lost."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    values[[0, numel // 2, numel - 1]] = float("nan")
    promise = Bounded(0.02, family=family)
    decoded = promises.through(promise, values, values.dtype)
    spoilt = hostile.spoilt_by(values, numel, block)
    assert spoilt is not None and torch.equal(decoded.isnan(), spoilt)
    exact, limit = (
        values.double(),
        torch.full((numel,), 0.02 * float(values.nan_to_num().abs().max())),
    )
    assert not bool(promises.Turn("", decoded, exact, limit, spoilt).wrong().any())


def wrong(
    decoded: list[float], exact: list[float], spoilt: list[bool] | None = None, limit: float = 0.1
) -> list[bool]:
    """Return the comparison's verdict for each value."""
    mask = None if spoilt is None else torch.tensor(spoilt)
    limits = torch.full((len(exact),), limit, dtype=torch.float64)
    right = torch.tensor(exact, dtype=torch.float64)
    found: list[bool] = (
        promises.Turn("", torch.tensor(decoded), right, limits, mask).wrong().tolist()
    )
    return found


def test_what_counts_as_wrong() -> None:
    nan, inf = float("nan"), float("inf")
    assert wrong([1.0, 1.05, 1.2], [1.0, 1.0, 1.0]) == [False, False, True]
    assert wrong([nan, inf], [1.0, 1.0]) == [True, True]
    assert wrong([nan, inf, 1.2], [1.0] * 3, [True] * 3) == [False, True, True]
    assert wrong([nan, nan], [1.0, 1.0], [True, False]) == [False, True]
    # a NaN or Inf that became a number
    assert wrong([1.0, 0.0, nan, inf], [nan, inf, nan, inf], [True] * 4) == [
        True,
        True,
        False,
        False,
    ]
    assert wrong([1e9, nan], [1.0, 1.0], limit=inf) == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kind_of_value_comes_and_subnormals_with_them(dtype: torch.dtype) -> None:
    found = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        values = hostile.hostile(generator, random.Random(f"{seed}"), dtype)
        assert values.dtype == dtype and values.numel() == hostile.NUMEL
        found += hostile.subnormals(values)
    assert found > hostile.NUMEL / 2


def test_what_is_outside_is_seen_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = promises.try_moved

    def off(values: torch.Tensor, choose: random.Random) -> promises.Turn:
        found = real(values, choose)
        found.exact = found.exact + 2 * found.limit + 1e-3
        return found

    monkeypatch.setitem(bounds.PARTS, "moved", off)
    result = bounds.hunt(2_000_000, seed=1, keep=tmp_path)
    assert result.outside and all(text.startswith("moved") for text in result.outside)
    assert bounds.replay(result.files[0]) == 1
