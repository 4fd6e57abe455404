"""scripts/studies/gather_study.py: what arrives of a shard, what feedback keeps, the chapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import results
from studies import gather_study
from studies.gather_study import WAYS, Gathers, Way, decoded
from studies.gather_tables import WORDS

VALUES = 0.02 * torch.randn(96, 32, generator=torch.Generator().manual_seed(0))


def test_every_way_has_its_words() -> None:
    assert {name.replace(" ", "-") for name in WAYS} == set(WORDS)


@pytest.mark.parametrize("name", list(WAYS))
def test_errors_fall_with_bits(name: str) -> None:
    flat, way = VALUES.flatten(), WAYS[name]
    each = (4,) if way.gaussian else (4, 8)
    errors = [float((decoded(flat, way, b) - flat).norm() / flat.norm()) for b in each]
    assert 0.05 < errors[0] < 0.25
    assert len(errors) == 1 or errors[1] < errors[0] / 12


def test_a_rotation_spreads_an_outlier_and_a_block_keeps_it_to_itself() -> None:
    wide = VALUES.flatten().clone()
    wide[::1024] *= 50

    def error(way: Way) -> float:
        return float((decoded(wide, way, 4) - wide).norm() / wide.norm())

    plain, rotated = error(Way("shard")), error(Way("shard", rotate=True))
    assert rotated < plain and error(Way()) < plain


def test_feedback_makes_the_mean_exact_and_the_way_without_does_not() -> None:
    """Of parameters that stand still, over the steps."""
    for feedback in (True, False):
        parameter, total = torch.empty_like(VALUES), torch.zeros_like(VALUES)
        gathers = Gathers([VALUES], Way(feedback=feedback), 4)
        for step in range(64):
            gathers([parameter], keep=True, measure=step == 0)
            total += parameter / 64
        error = float((total - VALUES).norm() / VALUES.norm())
        assert (error < 0.01) == feedback and 0.05 < gathers.errors[0] < 0.2


def test_looking_twice_in_a_step_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.empty_like(VALUES), torch.empty_like(VALUES)
    gathers = Gathers([VALUES], Way(feedback=True), 4)
    gathers([first], keep=False)
    gathers([second], keep=True)
    assert torch.equal(first, second)
    gathers([second], keep=True)
    assert not torch.equal(first, second)


def test_chapter(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "study", tmp_path / "out"
    source.mkdir()
    cases = {"native_fp32": 1.0, "block_4": 1.02, "block-feedback_4": 1.03, "block_8": 1.001}
    for seed in (0, 1):
        for name, factor in cases.items():
            record: dict[str, Any] = {
                "steps": 20, "losses": [factor * 3.0] * 20, "valid": factor * 3.0,
                "valid_exact": 3.0, "error": 0.1, "bits": 4.26,
            }  # fmt: skip
            (source / f"{name}_seed{seed}.json").write_text(json.dumps(record))
    assert results.main(["--gathers", str(source), "--out", str(out)]) == 0
    text = (out / "gathers.md").read_text()
    assert (
        "| 4 | `blockint`: a scale for 32 values | 4.26 | 1.0e-01 | +2.00 | +2.00, +2.00 |" in text
    )
    assert "seeds\n0, 1." in text and "--steps 20 --seeds 0 1" in text
    assert (out / "gathers.png").stat().st_size > 5_000
    assert gather_study.parse(["--bits", "4"]).bits == [4]
    for file in source.glob("native*"):
        file.unlink()
    assert results.main(["--gathers", str(source), "--out", str(out)]) == 1
