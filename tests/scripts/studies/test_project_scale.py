"""scripts/studies/project_scale.py: the cost model, and what is projected with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridcomp.plan.cost.prices import Calibration
from studies import project_scale
from studies.projection import chapter, neox
from tests.scripts.bench.made_rows import rows

pytest.importorskip("yaml")
NO_LATENCY = replace(neox.Assumed(), latency=0.0)
#: nothing hides, nothing is slower than its bytes
PLAIN = Calibration(overlap=0.0)


def test_projection_has_the_volumes_of_the_model() -> None:
    one = neox.step(NO_LATENCY, 24, "baseline", 32, PLAIN)
    two = neox.step(NO_LATENCY, 48, "baseline", 32, PLAIN)
    assert "dp" not in one.nbytes and "zero" not in one.nbytes
    # the largest stage's gradients to the other replica and back, at a quarter of 25 GB/s
    values = two.native_nbytes["zero"] / 4 * 2
    assert 20.55e9 / 24 < values < 1.2 * 20.55e9 / 24
    assert two.nbytes["dp"] == 2 * two.nbytes["zero"] == pytest.approx(4 * values, rel=1e-6)
    assert two.exposed["zero"] == pytest.approx(0.5 * values * 4 / 6.25e9, rel=0.1)
    # a boundary is 12.58 M values, cut over four tensor ranks, forward and backward, and the
    # parts are gathered again
    sent = 32 * 2 * 2048 * 6144 * 4
    assert one.nbytes["pp"] == pytest.approx(sent / 4 + sent * 3 / 4)
    short = neox.step(NO_LATENCY, 48, "baseline", 16, PLAIN)
    assert short.nbytes["dp"] == two.nbytes["dp"] / 2
    for width, whole in ((32, two), (16, short)):
        naive = neox.step(NO_LATENCY, 48, "naive-zfp", width, PLAIN)
        # the half of a bucket that another rank owns, at 8 bits
        assert naive.nbytes["dp"] == pytest.approx(whole.nbytes["dp"] * 8 / width / 2)
    assert neox.choices("zhybrid", 16)["tp", "forward"].native
    assert not neox.choices("zhybrid", 32)["tp", "forward"].native
    with pytest.raises(ValueError, match="multiple of 24"):
        neox.step(NO_LATENCY, 30, "baseline", 32, PLAIN)


def test_projection_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench_training.json"
    file.write_text(json.dumps([*rows(), {"layout": "dp2", "arm": "x", "failed": "why"}]))
    short = [str(file), "--out", str(tmp_path / "out"), "--gpus", "24", "48", "--no-plans"]
    assert project_scale.main(short) == 0
    said = capsys.readouterr().out
    assert "held out: 6 cells" in said and "the paper, up to 192" in said
    made = json.loads((tmp_path / "out" / "projection.json").read_text())
    assert len(made["projected"]) == 2 * 2 * 5 and made["planned"] == []
    assert (tmp_path / "out" / "projection.png").stat().st_size
    wrong = [
        {**row, "seconds": row["seconds"] * (3 if row["arm"] == "naive-zfp" else 1)}
        for row in rows()
    ]
    file.write_text(json.dumps(wrong))
    assert project_scale.main(short) == 2


def test_plans_stand_beside_the_papers_gains() -> None:
    plan = neox.planned(neox.Assumed(), 48, "recommended", PLAIN).plans[0]
    assert plan.layout.ranks == 48
    assert plan.prediction.device_nbytes <= 0.92 * 16e9
    row = {"gpus": 48, **{
        budget: {"layout": str(plan.layout), "samples_per_second": rate, "device_nbytes": 14e9}
        for budget, rate in (("native", 4.0), ("recommended", 5.0))
    }}  # fmt: skip
    lines = chapter.plans([row, {"gpus": 1, "reason": "no room"}])
    assert "| +25.0 % | 14.0 |" in lines[-3]
    assert "nothing fits" in lines[-2] and lines[-1] == "\n1 GPUs: no room."
