"""Texts of logs, labels and titles stay text in the report, its table and its picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hybridcomp.tools.compare import Wishes, compare_runs
from tests.test_escaping import HOSTILE
from tests.tools.compare.made import HEADER, write_run

TEXT = "".join(HOSTILE)


def test_a_hostile_log_is_text_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    settings = {"optimizer": {"name": TEXT}}
    base = write_run(tmp_path / "base", 0, 1.0)
    other = write_run(tmp_path / "other", 0, 1.1, ledger=True, deepspeed=settings)
    lines = base.read_text().splitlines()
    header = {"run": {**HEADER, "seed": 0, "deepspeed": {"optimizer": {"name": "a"}}}}
    base.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    label = TEXT.replace("=", "-").replace(",", ";")
    command = ["hybridcomp", "compare", TEXT]
    wishes = Wishes(tmp_path / "out", title=TEXT, wandb="none", command=command)
    compare_runs([f"a={base}", f"{label}={other}"], wishes)
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\u202e" not in said
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    prose = report[: report.rindex("````")]
    prose = prose[: prose.rindex("````")]
    assert "<script" not in prose and not re.search(r"(?<!\\)\[x\]", prose)
    assert [line for line in prose.splitlines() if line.startswith("#")] == [prose.splitlines()[0]]
    rows = [line for line in prose.splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert len(cells) <= 2, "a row for a run, of two tables"
    assert (tmp_path / "out" / "losses.png").stat().st_size
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"][1]["label"]
