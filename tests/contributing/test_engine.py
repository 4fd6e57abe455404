"""Follow ``docs/contributing/engine.md`` literally: an engine outside hybridcomp."""

from __future__ import annotations

import re
from pathlib import Path

from tests.contributing.walk import MOST, files, steps
from tests.paths import ROOT
from tests.scripts_on_ranks import run_script


def test_an_engine_of_ones_own_trains_as_its_block_says(tmp_path: Path) -> None:
    for step in steps("engine.md"):
        if step.language == "python":
            (tmp_path / step.file).write_text(step.text)
    ended = run_script(tmp_path, "try_toyengine.py")
    assert ended.returncode == 0, ended.output
    found = re.findall(r"^rank (\d), ([\w ]+): loss ([\d.]+)$", ended.output, re.MULTILINE)
    losses = {(rank, name): float(loss) for rank, name, loss in found}
    assert len(losses) == 6
    for rank in "01":
        native = losses[rank, "native"]
        assert losses[rank, "lossless"] == native
        assert losses[rank, "4 bits"] != native and losses[rank, "4 bits"] < 1.1 * native
    lines = re.findall(r"step 30: dp (\w+)\S* ([\d.]+)x", ended.output)
    ratios = {codec: float(ratio) for codec, ratio in lines}
    assert ratios["none"] == 1 and ratios["expcode"] > 1.05 and ratios["blockint"] > 6


def test_an_engine_in_the_repository_takes_few_files() -> None:
    named = files("engine.md")
    assert len(named) <= MOST
    there = {name for name in named if (ROOT / name).exists()}
    assert there == {"hybridcomp/dimensions.py", "patches/registry.py", "CHANGELOG.md"}
    assert all((ROOT / name).parent.is_dir() for name in named)
