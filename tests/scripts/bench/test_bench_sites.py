"""Time to an equal loss over two sites, and the page that is made of it and of islands' losses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from bench import bench_sites, results, sync_chapter
from bench.bench_sites import EVERY_STEP, PLAIN, Curve, read_curve, rows_of
from hybridcomp.compare import launch
from hybridcomp.config import CompressionConfig
from tests.scripts.bench.test_results import finish


def curve(step_s: float, losses: list[float], wait_s: float = 0.0) -> Curve:
    steps = np.arange(1.0, len(losses) + 1)
    return Curve(
        np.array(losses),
        np.asarray(step_s * steps, np.float64),
        losses[-1],
        wait_s,
        int(wait_s > 0),
        0.0,
    )


def test_time_to_the_loss_that_all_reach() -> None:
    falling = [4.0, 3.0, 2.0, 1.0]
    curves = {
        "native": curve(10.0, falling),
        EVERY_STEP: curve(2.0, falling),
        PLAIN: curve(1.0, [4.0, 3.5, 3.0, 2.0], wait_s=0.5),
        "streaming": curve(1.0, [4.0, 3.5, 3.0, 1.5], wait_s=0.05),
    }
    found = {row["run"]: row for row in rows_of(curves, window=2)}
    # means of two steps: falling 3.5, 2.5, 1.5; islands 3.75, 3.25, 2.5
    assert found["native"]["equal_loss"] == 2.5
    assert found["native"]["seconds_to_equal_loss"] == 30.0
    assert found[EVERY_STEP]["seconds_to_equal_loss"] == 6.0
    assert found[PLAIN]["seconds_to_equal_loss"] == 4.0 and found[PLAIN]["faster"] == 1.5
    assert found["streaming"]["wait_hidden"] == pytest.approx(0.9)
    assert found[PLAIN]["wait_hidden"] is None and found["native"]["wait_hidden"] is None
    assert curves["native"].seconds_to(0.5, 2) is None


def test_every_block_is_valid() -> None:
    for block in bench_sites.RUNS.values():
        assert block is None or CompressionConfig.parse(block).enabled


def asked(tmp_path: Path, *words: str) -> argparse.Namespace:
    (tmp_path / "text_train.idx").touch()
    found: argparse.Namespace = bench_sites.parse(
        ["--data", str(tmp_path / "text"), "--out", str(tmp_path / "out"), *words]
    )
    return found


def test_a_training_that_is_there_is_read_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], output: Path, *_: object, **__: object) -> int:
        commands.append(command)
        step = {"step": 1, "loss": 2.0, "seconds": 0.5}
        end = {"summary": True, "valid_loss": 2.0}
        lines = [*([step] * 4), end]
        (output.parent / "loss.jsonl").write_text("\n".join(map(json.dumps, lines)))
        ledger = [
            {"step": 2, "sync": {"meet_wait_ms": 30.0, "meetings": 1.0}, "dimensions": {}},
            {"summary": True, "step": 4, "dimensions": {"sync": {"forward": {"inter_MB": 2.0}}}},
        ]
        (output.parent / "ledger.jsonl").write_text("\n".join(map(json.dumps, ledger)))
        return 0

    monkeypatch.setattr(launch, "run_logged", run)
    options = asked(tmp_path, "--rates", "50mbit", "--runs", "native", PLAIN, "--window", "2")
    options.steps = 4
    first = bench_sites.study(options)
    assert len(commands) == 2 and bench_sites.study(options) == first and len(commands) == 2
    assert "hybridcomp.run" not in commands[0] and "hybridcomp.run" in commands[1]
    assert commands[1][commands[1].index("--rate") + 1] == "50mbit"
    found = read_curve(options.out / "50mbit" / PLAIN)
    assert (found.wait_s, found.meetings, found.nbytes) == (0.03, 1, 2e6)


@pytest.mark.parametrize(
    "words, message",
    [(["--rates", "fast"], "--rates"), (["--steps", "30"], "--steps: expected twice")],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        asked(tmp_path, *words)
    assert message in capsys.readouterr().err


def test_the_page_has_losses_by_h_and_the_sites(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    for seed in (0, 1):
        for name, factor in (("baseline", 1.0), ("H30 fp32", 1.01), ("H30 4 bits", 1.02)):
            finish(study, "dp2", name, seed, factor)
    finish(study, "dp2", "H10 fp32", 0, 1.0)
    rows = rows_of({EVERY_STEP: curve(2.0, [2.0] * 4), PLAIN: curve(1.0, [2.0] * 4, 0.5)}, 2)
    settings = {"steps": 4, "seed": 0, "batch": 2, "window": 2}
    (study / "sites").mkdir()
    (study / "sites" / "sites.json").write_text(
        json.dumps({"settings": settings, "rates": {"50mbit": rows}})
    )
    assert results.main(["--sync", str(study), "--out", str(out)]) == 0
    text = (out / "sync.md").read_text()
    assert "| H30 fp32 | " in text and "+1.00 ± 0.00 |  |" in text
    assert "+2.00 ± 0.00 | +0.99 ± 0.00 |" in text, "paired with fp32 of the same H"
    assert "Left out, with fewer than 2 seeds: H10 fp32 (1)." in text
    assert "### 50 Mb/s" in text and "| islands | 2.0000 | 2.0000 | 1000 | 2.0 | 2.00 |" in text
    assert "--islands 30\n" in text and "bench_sites.py --out runs/loss_study/sites" in text
    assert str(tmp_path) not in text
    assert (out / f"sync_{sync_chapter.LAYOUT}.png").stat().st_size > 10_000


def test_losses_without_islands_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(tmp_path / "study", "dp2", "baseline", 0, 1.0)
    assert results.main(["--sync", str(tmp_path / "study"), "--out", str(tmp_path / "out")]) == 1
    assert "no islands with two seeds" in capsys.readouterr().err
