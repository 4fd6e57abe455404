"""scripts/studies/project_scale.py: the cost model, and what is projected with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import project_scale
from studies.projection import fit, neox
from tests.scripts.bench.made_rows import rows


def test_model_finds_the_constants_and_is_checked_on_other_cells() -> None:
    alone = {**rows()[0], "layout": "3d"}
    unshaped = {**rows()[0], "r": None, "rate": None}
    fitted, held = fit.split(fit.usable([*rows(), alone, unshaped]))
    assert len(fitted) == 12 and len(held) == 6
    assert not any(row in held for row in fitted)
    model = fit.fit(fitted)
    assert model.base == pytest.approx({"dp2": 0.8, "pp2": 0.8}, rel=1e-4)
    assert model.slowdown == pytest.approx({"dp2": 1.1, "pp2": 1.4}, rel=1e-4)
    assert (model.coding, model.round) == pytest.approx((0.8, 0.01), rel=1e-4)
    assert model.overlap == 0
    held[0]["seconds"] *= 2
    found = fit.report(model, fitted, held)
    assert found["fitted"]["worst"] < 1e-4 and found["held_out"]["within_15_percent"] == 5
    assert found["held_out"]["worst"] == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="expected at least 7 cells"):
        fit.fit(fitted[:3] + fitted[6:9])


def test_negative_constants_are_not_found() -> None:
    import numpy as np

    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit.non_negative(table, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_projection_has_the_volumes_of_the_model() -> None:
    cluster, base = neox.Cluster(latency=0.0), neox.Scheme("baseline")
    one = neox.step(cluster, 24, base, 32, 1.0, 0.0, 1.0)
    two = neox.step(cluster, 48, base, 32, 1.0, 0.0, 1.0)
    assert one.dp == 0 and two.samples == 2 * one.samples
    # 856 M gradients a GPU, half of them to the other replica and back, at a quarter of 25 GB/s
    assert two.dp == pytest.approx(2 * 0.5 * 20.55e9 / 24 * 4 / 6.25e9)
    # a boundary is 12.58 M values, cut over four tensor ranks, forward and backward
    assert one.pp == pytest.approx(32 * 2 * 2048 * 6144 / 4 * 4 / 6.25e9)
    short = neox.step(cluster, 48, base, 16, 1.0, 0.0, 1.0)
    assert short.dp == pytest.approx(two.dp / 2) and short.compute == two.compute
    for width in (32, 16):
        naive = next(s for s in neox.schemes(width, 1, 1, 1) if s.name == "naive-zfp")
        saved = neox.step(cluster, 48, naive, width, 1.0, 0.0, 0.0)
        assert saved.dp == pytest.approx((two if width == 32 else short).dp * 8 / width)
    assert next(s for s in neox.schemes(16, 1, 1, 1) if s.name == "zhybrid").tp is None
    with pytest.raises(ValueError, match="multiple of 24"):
        neox.step(cluster, 30, base, 32, 1.0, 0.0, 1.0)


def test_projection_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench_training.json"
    file.write_text(json.dumps([*rows(), {"layout": "dp2", "arm": "x", "failed": "why"}]))
    assert project_scale.main([str(file), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "held out: 6 cells" in said and "the paper, up to 192" in said
    made = json.loads((tmp_path / "out" / "projection.json").read_text())
    assert (
        len(made["projected"]) == 2 * 4 * 5 and (tmp_path / "out" / "projection.png").stat().st_size
    )
    wrong = [
        {**row, "seconds": row["seconds"] * (3 if row["arm"] == "naive-zfp" else 1)}
        for row in rows()
    ]
    file.write_text(json.dumps(wrong))
    assert project_scale.main([str(file), "--out", str(tmp_path / "out")]) == 2
