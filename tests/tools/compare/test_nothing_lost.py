"""A missing picture, chart or folder loses no training; too few steps give a message."""

from __future__ import annotations

import builtins
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridcomp.tools import pages, progress
from hybridcomp.tools.commands import cli
from hybridcomp.tools.compare import chart, command, launch, trained
from hybridcomp.tools.compare.json_lines import LOG
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.compare.statistics import Aligned, noise
from tests.tools.compare.made import HEADER, record, write_run

#: trains briefly, and prints so
TRAINER = """
import json, sys, time
open("started.txt", "a").write("x")
with open(sys.argv[1], "w") as file:
    for step in range(1, 61):
        print(json.dumps({"step": step, "loss": 2 + 1 / step}), file=file, flush=True)
        time.sleep(0.005)
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("trainer.py").write_text(TRAINER)
    # the command already names the arming module, here a stand-in
    Path("runner.py").write_text("import sys; del sys.argv[:2]; exec(open('trainer.py').read())")
    return ["compare", "--launch", "--candidate", "recommended", "--out", "out", "--",
            sys.executable, "runner.py", launch.MODULE, "t.py", "{folder}/loss.jsonl"]  # fmt: skip


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide these packages."""
    there = find_spec
    for module in (command, pages):
        monkeypatch.setattr(
            module, "find_spec", lambda name: None if name in names else there(name)
        )
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in names:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_the_report_is_written_without_matplotlib(
    trainer: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "matplotlib", "wandb", "plotly")
    assert cli.main(trainer) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    for said in ("no picture: it needs matplotlib", "no report.html: it needs plotly: pip install"):
        first = next(place for place, line in enumerate(lines) if line.startswith(said))
        assert first < lines.index("1/2 baseline seed 0: training")
    assert Path("started.txt").read_text() == "xx"
    assert "![" not in Path("out/report.md").read_text()
    rows = json.loads(Path("out/comparison.json").read_text())["runs"]
    assert [row["label"] for row in rows] == ["baseline", "recommended"]
    assert "written: out/report.md, comparison.json" in shown.out


def test_a_picture_or_a_chart_that_fails_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from hybridcomp.tools.compare import draw, page

    def broken(*_: object) -> None:
        raise RuntimeError("no\nfont")

    monkeypatch.setattr(draw, "draw", broken)
    monkeypatch.setattr(pages, "missing", str)
    monkeypatch.setattr(page, "page", broken)
    monkeypatch.setattr(chart, "log", broken)
    runs = [str(write_run(tmp_path / name, 0, 1.0)) for name in ("a", "b")]
    out = tmp_path / "out"
    assert cli.main(["compare", *runs, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "no picture: RuntimeError: no font" in said
    assert "no report.html: RuntimeError: no font" in said
    assert "![" not in (out / "report.md").read_text()
    assert (out / "comparison.json").is_file()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--out", "file/out"], "--out file/out: Not a directory; expected a folder that can be"),
        (["--out", "/proc/none/out"], "--out /proc/none/out: "),
        (["--wandb", "mine"], "the W&B chart needs W&B"),
        (["--last", "0"], "--last: expected at least 1"),
        (["--candidate", "nope"], "nope"),
    ],
)
def test_nothing_is_trained_for_a_report_that_cannot_be_written(
    trainer: list[str],
    more: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("file").write_text("")
    hide(monkeypatch, "wandb")
    assert cli.main([*trainer[:6], *more, *trainer[6:]]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert said in error and not Path("started.txt").exists()


def test_progress_is_said_while_it_trains(
    trainer: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    assert cli.main([*trainer[:6], "--wandb", "none", *trainer[6:]]) == 0
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if ": 0 s, step " in line and ", loss 2." in line]
    assert told and not any("left" in line for line in told if line.startswith("1/2"))
    assert all(line.endswith(" left") for line in told if line.startswith("2/2"))
    assert [line.partition(": ")[2].split()[0] for line in lines if "done in" in line] == [
        "done"
    ] * 2


def test_who_watches_may_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]

    def stop(seconds: float, folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.LaunchedTraining("a", tmp_path / "a", words, {}).run(stop, 0.05)
    assert not (tmp_path / "a" / "done.json").exists()


def test_progress_reads_what_there_is(tmp_path: Path) -> None:
    assert trained.last_line(tmp_path) == "" and trained.last_step(tmp_path) == 0
    (tmp_path / trained.OUTPUT).write_bytes(b"x" * 9000 + b"\nepoch\x1b[31m 2 \xff\n\n")
    assert trained.last_line(tmp_path).startswith("epoch\\x1b[31m 2")
    (tmp_path / LOG).write_text('{"step": 3, "loss": 2.5}\n{"summary": true}\n{"st')
    assert trained.last_line(tmp_path) == "step 3, loss 2.5" and trained.last_step(tmp_path) == 3


def notes(tmp_path: Path, steps: int, factor: float, spread: float) -> list[str]:
    """Return the notes for two runs whose losses differ by ``factor`` and random ``spread``."""
    draws = np.random.default_rng(0).normal(0, spread, (2, steps))
    paths = []
    for number, scale in enumerate((1.0, factor)):
        path = tmp_path / str(number) / "loss.jsonl"
        path.parent.mkdir(exist_ok=True)
        losses = scale * (2 + 3 / np.arange(1, steps + 1)) * (1 + draws[number])
        records = [{"run": {**HEADER, "seed": 0}}]
        records += [record(step, float(loss)) for step, loss in enumerate(losses, 1)]
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        paths.append(f"{'ab'[number]}={path}")
    return list(command.compared(paths, command.Wishes()).notes)


def test_few_steps_and_noise_are_said(tmp_path: Path) -> None:
    few = notes(tmp_path, 8, 0.84, 0.001)
    said = "8 points are few: the final loss is the mean of the last 8, over which"
    assert any(note.startswith(said) for note in few)
    assert any("gap of -1" in note and "is beyond the noise" in note for note in few)
    assert any("is within the noise between" in note for note in notes(tmp_path, 100, 1.004, 0.02))
    beyond = notes(tmp_path, 100, 1.05, 0.02)
    assert any("is beyond the noise" in note for note in beyond)
    assert not any("points are few" in note for note in beyond)


def test_the_noise_is_what_chance_gives(tmp_path: Path) -> None:
    """Among runs that differ by chance alone about one in twenty exceeds the noise."""
    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        losses = [2 * (1 + rng.normal(0, 0.01, (1, 60))) for _ in range(2)]
        chance = noise(Aligned("steps", np.arange(60.0), losses, None, [None] * 2, []), 1, [0], 20)
        gap = 100 * (losses[1][:, -20:].mean() / losses[0][:, -20:].mean() - 1)
        assert chance is not None
        found += abs(gap) > chance
    assert 2 <= found <= 24


def test_a_baseline_of_zero_is_one_line(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, 0, 0.0)) for name in ("a", "b")]
    with pytest.raises(CompareError, match="final loss is 0"):
        command.compared(runs, command.Wishes())
