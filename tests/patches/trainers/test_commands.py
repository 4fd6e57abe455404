"""Examples for popular trainers: every command of their pages, run literally."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest

from tests.patches.trainers.launched import (
    EXAMPLES,
    launch,
    ledger,
    needs,
    page_commands,
    script_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMANDS = page_commands()


def test_every_example_is_on_a_page() -> None:
    assert {script_of(command) for command in COMMANDS} == {
        path.name
        for path in EXAMPLES.glob("train_*.py")
        if path.name not in ("train_gpt.py", "train_ngrams.py", "train_elastic.py")
    }
    assert len(COMMANDS) >= 12


def losses_of(folder: Path, printed: str) -> tuple[float, float]:
    """Return the first and the last loss that a trainer logged."""
    if found := re.search(r"losses ([\d.]+) to ([\d.]+)", printed):
        return float(found[1]), float(found[2])
    if found := re.search(r"losses in (\S+)", printed):  # written by Lightning's logger
        with (folder / found[1]).open() as file:
            rows = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
        return rows[0], rows[-1]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)  # removes torchtitan's colours
    rows = [float(loss) for loss in re.findall(r"loss: +([\d.]+)", plain)]
    return rows[0], rows[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_trains_compressed(command: str, tmp_path: Path) -> None:
    needs(command)
    printed = launch(tmp_path, command)
    first, last = losses_of(tmp_path, printed)
    assert math.isfinite(first) and 0 < last < 0.95 * first
    assert re.search(r"\[hybridcomp\] step 10: dp blockint\(bits=4\) \d", printed)
    *reports, summary = ledger(tmp_path)
    assert [report["step"] for report in reports][:2] == [10, 20] and summary["summary"]
    rows = {name: row["forward"] for name, row in summary["dimensions"].items()}
    assert 5 < rows["dp"]["raw_MB"] / rows["dp"]["wire_MB"] < 16 and rows["dp"]["error"] < 0.2
    if "ddp.json" not in command:
        # torchtitan gathers 16 bits
        assert 1.7 < rows["zero"]["raw_MB"] / rows["zero"]["wire_MB"] < 4
        assert 0 < rows["zero"]["error"] < 0.02
