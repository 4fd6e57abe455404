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
from hybridcomp.errors import install_hint
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: first cell of a row of README's table -> layout and arm of speed.json
ROWS = {
    "ZeRO 0": ("dp2", "recommended"),
    "ZeRO 1": ("zero1", "recommended"),
    "ZeRO 2": ("zero2", "recommended"),
    "ZeRO 3": ("zero3", "recommended"),
    "two pipeline stages": ("pp2", "recommended"),
    "two tensor ranks": ("tp2", "recommended"),
    "FSDP2, gradients summed in fp32": ("fsdp2", "recommended"),
    "DDP, gradients summed in fp32": ("ddp", "recommended"),
    "FSDP2 with `reduce_dtype=torch.bfloat16`": ("fsdp2", "peer bf16"),
    "DDP with torch's bf16 hook": ("ddp", "peer bf16"),
    "DDP with torch's PowerSGD hook, rank 4": ("ddp", "peer powersgd-4"),
    "ZeRO++ (qgZ and qwZ, reimplemented) beside ZeRO 0": ("dp2", "peer qgz-qwz"),
}
#: layouts of feedback_others.json; of others the file, the layout and the run
EIGHT_SEEDS = {
    "ZeRO 1": "dp2",
    "FSDP2, gradients summed in fp32": "fsdp2",
    "DDP, gradients summed in fp32": "ddp2",
}
LOSSES = {
    "two pipeline stages": ("loss.json", "pp2", "recommended"),
    "DDP with torch's PowerSGD hook, rank 4": ("loss_torch.json", "ddp2", "peer powersgd-4"),
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


def readme_rows() -> dict[str, list[str]]:
    """The rows with figures of README's table: what follows the first cell, by that cell."""
    rows = re.findall(r"^\| ([^|]+) \| (1/[^|]+)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$",
                      README, re.MULTILINE)  # fmt: skip
    return {words: [cell.strip() for cell in cells] for words, *cells in rows}


def test_readme_table_is_the_measured_one() -> None:
    cells = {
        (row["layout"], row["arm"], row["r"]): row
        for row in json.loads((ROOT / "docs/results/speed.json").read_text())
    }
    rows = readme_rows()
    assert list(rows) == list(ROWS)
    for words, (saving, *speeds, _) in rows.items():
        saved = set()
        for r, speed in zip((0.25, 1.0, 4.0), speeds, strict=True):
            measured = cells.get((*ROWS[words], r))
            assert bool(measured) == bool(speed), (words, r)
            if measured:
                speed_up, _, told = speed.partition(" (r = ")
                assert float(speed_up) == pytest.approx(measured["speed_up"], abs=0.006)
                off = abs(measured["r_measured"] / r - 1)  # far from the column's: it is said
                assert bool(told) == (off > 0.2), (words, r)
                if told:
                    assert float(told[:-1]) == pytest.approx(measured["r_measured"], abs=0.06)
                saved.add(round(measured["saving"], 1))
        figure = float(saving.removeprefix("1/"))
        assert min(saved) - 0.4 <= figure <= max(saved) + 0.4, words
        assert any(figure == pytest.approx(one, abs=0.4 if one > 10 else 0.06) for one in saved)


def test_readme_losses_are_the_measured_ones() -> None:
    others = json.loads((ROOT / "docs/results/feedback_others.json").read_text())
    for words, (*_, told) in readme_rows().items():
        assert bool(told) == (words in LOSSES or words in EIGHT_SEEDS), words
        if words in EIGHT_SEEDS:
            gaps = others["eight seeds"][EIGHT_SEEDS[words]]
            assert told == f"{gaps['recommended']} %"
        elif told:
            file, layout, label = LOSSES[words]
            runs = json.loads((ROOT / "docs/results" / file).read_text())[layout]["runs"]
            run = next(run for run in runs if run["label"] == label)
            assert told == f"{run['gap']:+.2f} ± {run['gap_interval']:.2f} %"


def test_the_readme_begins_with_what_for_whom_and_how_much() -> None:
    """The speeds of its third line span those of `recommended` at r = 1."""
    title, empty, *lines = README.splitlines()[:5]
    assert title.startswith("# ") and not empty and all(lines)
    found = re.search(r"(\d\.\d) to (\d\.\d) times as fast", lines[2])
    speeds = [float(row[2].split()[0]) for words, row in readme_rows().items()
              if ROWS[words][1] == "recommended" and row[2]]  # fmt: skip
    assert found and found.groups() == (f"{min(speeds):.1f}", f"{max(speeds):.1f}")


def test_parts_of_the_installation_can_be_pasted_alone() -> None:
    """No block installs two kinds of CuPy, and none clones from an address that is none."""
    for page in ("README.md", "docs/getting_started.md"):
        for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL):
            assert block.count("pip install -e") <= 1, block
            assert "git clone" not in block or "://" in block, block


def test_ci_runs_the_commands_of_the_readme() -> None:
    assert "\n```\nscripts/test\n```\n" in README
    lines = (ROOT / ".ci/run").read_text("utf-8").splitlines()
    commands = [line.partition("#")[0].strip() for line in lines]
    assert "scripts/test --version" in commands and "scripts/test & tests=$!" in commands
    installing = [line for line in commands if "pip install" in line]
    assert not installing, "CI installs what the test command does not"


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Links, anchors and navigation, as mkdocs sees them: a warning is an error."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip(f"mkdocs is not installed ({install_hint('docs')})")
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--build", str(tmp_path)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("index", "block", "engines/huggingface", "results/speed", "nccl_on_one_gpu"):
        assert (tmp_path / f"{name}.html").is_file()
    dead = [
        f"{page.relative_to(tmp_path)}: {path}"
        for page in tmp_path.rglob("*.html")
        if page.name != "404.html"  # it is served for any address, so its links begin at the root
        for path in re.findall(r'<(?:a|img)\s[^>]*(?:href|src)="([^"#?]+)', page.read_text("utf-8"))
        if not re.match(r"[a-z]+:|//", path) and not (page.parent / path).exists()
    ]
    assert not dead, dead
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r"<(?:script|link)[^>]+(?:src|href)=\"([^\"]+)\"", home)
    elsewhere = [path for path in loaded if "//" in path]
    assert not elsewhere, "the site must open without a network"
    # the search of a page opened as a file: a worker without a server, the index as a script
    assert "iframe-worker.js" in loaded and (tmp_path / "iframe-worker.js").is_file()
    assert (tmp_path / "search/search_index.js").read_text("utf-8").startswith("var __index = {")


def test_charts_stand_before_tables() -> None:
    """In every section of a page of results."""
    late = [
        f"{page.name}: {section.splitlines()[0]}"
        for page in sorted((ROOT / "docs/results").glob("*.md"))
        for section in re.split(r"^#+ ", page.read_text("utf-8"), flags=re.MULTILINE)[1:]
        if 0 <= section.find("\n|") < section.find("\n![")
    ]
    assert not late


def test_pages_of_results_do_not_tell_how_they_came_about() -> None:
    words = (
        r"\b(?:session|earlier run|in the runs of before|what was changed|since then|written since|"
        r"of that day|the day before|by now|ran again)\b|\| before \| now \|"
    )
    for page in sorted((ROOT / "docs/results").glob("*.md")):
        told = re.findall(words, page.read_text("utf-8"), re.IGNORECASE)
        assert not told, (page.name, told)
