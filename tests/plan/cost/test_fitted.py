"""The cost model that is fitted to measured trainings, and the simulator on the same cells."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybridcomp.plan.cost import fitted
from tests.paths import ROOT
from tests.scripts.bench.made_rows import rows


def test_model_finds_the_constants_and_is_checked_on_other_cells() -> None:
    alone = {**rows()[0], "layout": "3d"}
    unshaped = {**rows()[0], "r": None, "rate": None}
    cells, held = fitted.split(fitted.usable([*rows(), alone, unshaped]))
    assert len(cells) == 12 and len(held) == 6
    assert not any(row in held for row in cells)
    model = fitted.fit(cells)
    assert model.base == pytest.approx({"dp2": 0.8, "pp2": 0.8}, rel=1e-4)
    assert model.slowdown == pytest.approx({"dp2": 1.1, "pp2": 1.4}, rel=1e-4)
    assert (model.coding, model.round) == pytest.approx((0.8, 0.01), rel=1e-4)
    assert model.overlap == 0
    held[0]["seconds"] *= 2
    found = fitted.report(model, cells, held)
    assert found["fitted"]["worst"] < 1e-4 and found["held_out"]["within_15_percent"] == 5
    assert found["held_out"]["worst"] == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="expected at least 7 cells"):
        fitted.fit(cells[:3] + cells[6:9])


def test_negative_constants_are_not_found() -> None:
    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fitted.non_negative(table, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_the_simulator_agrees_with_the_page_on_its_cells() -> None:
    """docs/results/projection.json: constants and errors of the fit to docs/results/speed.json."""
    results = ROOT / "docs" / "results"
    said = json.loads((results / "projection.json").read_text())
    found = fitted.usable(json.loads((results / "speed.json").read_text()))
    cells, held = fitted.split(found)
    model = fitted.fit(cells)
    assert model.overlap == said["model"]["overlap"]
    assert model.coding == pytest.approx(said["model"]["coding"])
    assert model.calibration().overlap == model.overlap
    for name, part in (("fitted", cells), ("held_out", held)):
        simulated = [model.timeline(cell).seconds for cell in part]
        assert simulated == pytest.approx([model.seconds(cell) for cell in part], rel=1e-9)
        errors = np.abs([s / cell["seconds"] - 1 for s, cell in zip(simulated, part, strict=True)])
        assert len(part) == said[name]["cells"]
        assert errors.mean() <= said[name]["mean"] * 1.0001
        assert np.quantile(errors, 0.9) <= said[name]["p90"] * 1.0001
        assert errors.max() <= said[name]["worst"] * 1.0001
