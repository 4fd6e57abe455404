"""--try and --check, with a training that only writes logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.plan.answer.check import check, describe
from hybridcomp.tools.plan.answer.trial import check_command, tried
from hybridcomp.tools.plan.layout import Layout
from tests.tools.plan.answer.made import CLUSTER, plan, prediction

#: a fake training: two stages take 0.4 s a step, one takes 0.3, four fail
TRAINING = """
import json, pathlib, sys
folder, stages = pathlib.Path(sys.argv[1]), int(sys.argv[2])
if stages == 4:
    sys.exit("no such layout")
config = json.loads((folder / "ds_config.json").read_text())
assert config["compression"]["preset"] == "planned"
seconds = {1: 0.3, 2: 0.4}[stages]
tokens = 4 * 8 * 128
with open(folder / "loss.jsonl", "w") as log:
    for step in range(1, 9):
        slow = 5 if step < 3 else 1
        print(json.dumps({"step": step, "loss": 1.0, "tokens": step * tokens,
                          "tokens_per_second": tokens / (slow * seconds)}), file=log)
"""
BATCH: dict[str, Any] = {"micro_batch": 2, "accumulation": 8}
TWO = plan(Layout(stages=2, data=2, cuts=(2, 2), zero_stage=1, **BATCH), prediction(0.35))
ONE = plan(Layout(data=2, tensor=2, zero_stage=1, **BATCH), prediction(0.36))
FOUR = plan(Layout(stages=4, data=2, cuts=(1, 1, 1, 1), **BATCH), prediction(0.37))


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    decided = ["{tensor}", "{cuts}"]
    return ["python", str(script), "{folder}", "{stages}", *decided, "--log={folder}/loss.jsonl"]


def test_the_fastest_that_ran_is_kept_and_a_failure_is_told(
    tmp_path: Path, command: list[str]
) -> None:
    said: list[str] = []
    found = tried([TWO, ONE, FOUR], CLUSTER, command, tmp_path / "out", {}, said.append)
    assert [one.plan for one in found] == [ONE, TWO]
    assert found[0].seconds == pytest.approx(0.3)
    assert found[1].miss == pytest.approx(0.4 / 0.35 - 1)
    assert any("failed" in text for text in said)
    (tmp_path / "train.py").write_text("raise SystemExit('must not run again')")
    again = tried([TWO], CLUSTER, command, tmp_path / "out", {}, said.append)
    assert again[0].seconds == pytest.approx(0.4)
    for changed, base in ((replace(TWO, length=64), {}), (TWO, {"gradient_clipping": 1.0})):
        with pytest.raises(CompareError, match="no plan ran"):
            tried([changed], CLUSTER, command, tmp_path / "out", base, said.append)


def test_plans_that_all_fail_are_one_line_that_names_the_rank(
    tmp_path: Path, command: list[str]
) -> None:
    ends = "print('[rank1]: ValueError: a batch is missing', flush=True); raise SystemExit(1)"
    (tmp_path / "train.py").write_text(ends)
    said: list[str] = []
    with pytest.raises(CompareError) as error:
        tried([TWO, FOUR], CLUSTER, command, tmp_path / "out", {}, said.append)
    text = str(error.value)
    assert text.startswith("--try: no plan ran; plan 2, ") and "\n" not in text
    assert "status 1: [rank1]: ValueError: a batch is missing; all of it is in" in text
    assert sum("failed: " in line and "[rank1]" in line for line in said) == 2
    assert not list(tmp_path.rglob("done.json"))


def test_a_command_that_does_not_take_what_plans_differ_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected -- and the command"):
        check_command([], [TWO])
    with pytest.raises(ConfigError, match=r"write \{config\}"):
        check_command(["python", "x.py"], [TWO])
    with pytest.raises(ConfigError, match=r"differ in tensor \(1, 2\); write \{tensor\}"):
        check_command(["python", "{config}", "{stages}"], [TWO, ONE])
    check_command(["python", "{config}"], [TWO, TWO])


def finished(folder: Path, seconds: float, wire_mb: dict[str, float]) -> Path:
    """Return a run of ten steps with a log and a ledger."""
    folder.mkdir()
    tokens = 4 * 8 * 128
    steps = [
        {"step": n, "loss": 1.0, "tokens": n * tokens, "tokens_per_second": tokens / seconds}
        for n in range(1, 11)
    ]
    (folder / "loss.jsonl").write_text("\n".join(map(json.dumps, steps)))
    rows: dict[str, Any] = {
        name: {"forward": {"codec": "x", "raw_MB": 1.0, "wire_MB": 10 * value, "ratio": 1.0}}
        for name, value in wire_mb.items()
    }
    summary = {"summary": True, "step": 10, "dimensions": rows}
    (folder / "ledger.jsonl").write_text(json.dumps(summary) + "\n")
    return folder


def test_a_run_that_is_as_planned_holds(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", 0.34, {"dp": 4.0, "pp": 4.04})
    found = check(TWO, run)
    assert all(one.held for one in found)
    assert [one.what for one in found] == [
        "step", "dp, bytes of all ranks", "pp, bytes of all ranks",
    ]  # fmt: skip
    assert list(describe(found))[-1] == "the plan held"


def test_what_missed_is_named(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", 0.5, {"dp": 5.0, "pp": 4.0, "tp": 1.0})
    found = check(TWO, run)
    missed = [one.what for one in found if not one.held]
    assert missed == ["step", "dp, bytes of all ranks", "tp, bytes of all ranks"]
    text = "\n".join(describe(found))
    assert "500 ms measured,     350 ms predicted, +42.9%  <- missed" in text
    assert "not predicted  <- missed" in text


def test_a_run_without_ledger_or_steps_is_an_error(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", 0.34, {"dp": 4.0})
    (run / "ledger.jsonl").unlink()
    with pytest.raises(CompareError, match='missing; write "ledger"'):
        check(TWO, run)
    (run / "loss.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}))
    with pytest.raises(CompareError, match="found 0 timed steps"):
        check(TWO, run)
