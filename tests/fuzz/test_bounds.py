"""Hostile values keep to every bound: the short form of ``scripts/fuzz.py bounds``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fuzzing import bounds
from hybridcomp.codecs import Bounded


def test_hostile_values_stay_within_every_bound(tmp_path: Path) -> None:
    result = bounds.hunt(12_000_000, seed=1, keep=tmp_path)
    assert result.outside == []
    assert len(result.tried) == 9  # three parts, three dtypes


@pytest.mark.parametrize("bound", [0.1, 0.02, 0.006])
def test_small_fp16_values_stay_within_a_bound_when_moved(bound: float) -> None:
    """Half of the bound is for fp16's own grid (found by fuzzing: up to 1.56 times outside)."""
    generator = torch.Generator().manual_seed(0)
    promise = Bounded(bound)
    for power in range(-24, -8):
        powers = torch.empty(4096).uniform_(-14, 0, generator=generator).exp()
        values = torch.randn(1 << 16, generator=generator) * powers.repeat_interleave(16)
        message = (values * 2.0**power).half()
        codec = promise.for_message(message.numel(), message.dtype, 1)
        error = (bounds.through(codec, message, message.dtype).double() - message.double()).abs()
        assert bool((error <= bound * bounds.absmax_of(message, promise.segment)).all())


def test_what_is_outside_is_seen_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bounds.try_moved

    def wrong(
        values: torch.Tensor, choose: random.Random
    ) -> tuple[str, torch.Tensor, torch.Tensor]:
        name, error, limit = real(values, choose)
        return name, error + 2 * limit + 1e-3, limit

    monkeypatch.setitem(bounds.PARTS, "moved", wrong)
    result = bounds.hunt(2_000_000, seed=1, keep=tmp_path)
    assert result.outside and all(text.startswith("moved") for text in result.outside)
    assert bounds.replay(result.files[0]) == 1
