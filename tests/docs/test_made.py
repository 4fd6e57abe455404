"""What is made from the code is current, the README is short and its figures are the measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import make_docs
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYOUTS = {
    "ZeRO 0, two nodes": "dp2",
    "ZeRO 1, two nodes": "zero1",
    "ZeRO 2, two nodes": "zero2",
    "ZeRO 3, two nodes": "zero3",
    "two pipeline stages": "pp2",
    "two tensor ranks": "tp2",
}


def test_what_is_made_from_the_code_is_current() -> None:
    pytest.importorskip("deepspeed")
    old = [str(path.relative_to(ROOT)) for path in make_docs.stale()]
    assert not old, "run scripts/make_docs.py"


def test_a_page_without_its_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected <!-- presets -->"):
        make_docs._with_part("# Presets\n", "presets", "| a |", "presets.md")


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_readme_table_is_the_measured_one() -> None:
    rows = json.loads((ROOT / "docs/results/speed.json").read_text())
    measured = {
        (row["layout"], row["r"]): row for row in rows if row["arm"] == "recommended" and row["r"]
    }
    found = re.findall(r"^\| ([\w ,]+) \| 1/([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
                       README, re.MULTILINE)  # fmt: skip
    assert [row[0] for row in found] == list(LAYOUTS)
    for words, saving, *speeds in found:
        cells = [measured[LAYOUTS[words], r] for r in (0.25, 1.0, 4.0)]
        assert float(saving) == pytest.approx(cells[0]["saving"], abs=0.06)
        for speed, cell in zip(speeds, cells, strict=True):
            assert float(speed) == pytest.approx(cell["speed_up"], abs=0.006)


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Links, anchors and navigation, as mkdocs sees them: a warning is an error."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs is not installed (pip install 'hybridcomp[docs]')")
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--build", str(tmp_path)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("index", "block", "engines/huggingface", "results/speed", "nccl_on_one_gpu"):
        assert (tmp_path / f"{name}.html").is_file()
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r"<(?:script|link)[^>]+(?:src|href)=\"(https?:[^\"]+)\"", home)
    assert not loaded, "the site must open without a network"
