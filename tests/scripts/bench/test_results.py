"""scripts/bench/results.py: chapters from what the measuring scripts left."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import continued_islands, loss_study, results
from bench.training_bench import gpu_losses, loss_records
from tests.compare.made import write_run


def finish(out: Path, layout: str, name: str, seed: int, factor: float, **more: Any) -> None:
    """A run as loss_study leaves it."""
    block = None if name == "baseline" else {"dp": "bf16"}
    options = argparse.Namespace(steps=60, after=0, divide_batch=4, lr=3e-4, muon_lr=None)
    case = loss_study.Case(layout, name, block, seed)
    folder = case.folder(out)
    write_run(folder, seed, factor, ledger=block is not None)
    settings = {**loss_study.settings_of(case, options, folder), **more}
    (folder / "done.json").write_text(json.dumps(settings))


def test_loss_chapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    for seed in (0, 1, 2):
        finish(study, "dp2", "baseline", seed, 1.0)
        finish(study, "dp2", "mine", seed, 1.01)
    finish(study, "dp2", "late", 0, 1.0)
    finish(study, "pp2", "baseline", 0, 1.0)
    assert results.main(["--loss", str(study), "--out", str(out)]) == 0
    text = (out / "loss.md").read_text()
    assert "| mine | 3 | 2.0" in text and "| +1.00 ± 0.00 |" in text
    assert "learning rate 0.0003" in text and "k tokens/s" not in text
    assert "Left out: late, of which 1 of 3 seeds finished." in text
    assert "Not measured yet with several seeds: pp2, pp2dp2, 3d, tp2d, cp4." in text
    command = "--steps 60 --seeds 0 1 2 --layouts dp2 --divide-batch 4 --lr 0.0003 --blocks"
    assert f"scripts/bench/loss_study.py {command} docs/results/loss_blocks.json" in text
    assert str(tmp_path) not in text
    assert json.loads((out / "loss_blocks.json").read_text()) == {"dp2": {"mine": {"dp": "bf16"}}}
    rows = json.loads((out / "loss.json").read_text())["dp2"]["runs"]
    assert rows[1]["gap"] == pytest.approx(1.0) and rows[1]["seconds"] is None
    assert (out / "loss_dp2.png").stat().st_size > 10_000


def test_loss_chapter_of_torchs_engines(tmp_path: Path) -> None:
    """It has its own page, so that neither study takes the other's place."""
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    for seed in (0, 1):
        for layout in ("ddp2", "fsdp2", "dp2"):
            for name in ("baseline", "mine", "peer bf16"):
                finish(study, layout, name, seed, 1.0)
    assert results.main(["--loss-torch", str(study), "--out", str(out)]) == 0
    text = (out / "loss_torch.md").read_text()
    assert "## FSDP2: gradients" in text and "ZeRO 1" not in text and "Not measured" not in text
    command = "--layouts ddp2 fsdp2 --divide-batch 4 --lr 0.0003 --presets --peers bf16 --blocks"
    assert f"{command} docs/results/loss_torch_blocks.json" in text
    assert "results.py --loss-torch runs/loss_study" in text
    assert set(json.loads((out / "loss_torch.json").read_text())) == {"ddp2", "fsdp2"}
    assert not (out / "loss.md").exists()


def test_feedback_chapter(tmp_path: Path) -> None:
    """Its pictures have names of their own, beside those of the chapter of losses."""
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    for seed in (0, 1):
        for name in ("baseline", "4 bits", "4 bits, feedback 8"):
            finish(study, "dp2", name, seed, 1.0)
    assert results.main(["--feedback", str(study), "--out", str(out)]) == 0
    text = (out / "feedback.md").read_text()
    assert "(feedback_dp2.png)" in text and "| 4 bits, feedback 8 | 2 |" in text
    assert "Not measured yet with several seeds: ddp2." in text
    assert (out / "feedback_dp2.png").is_file() and not (out / "loss_dp2.png").exists()
    assert "In other trainings" not in text and not (out / "feedback_others.json").exists()


def test_feedback_in_other_trainings(tmp_path: Path) -> None:
    """Each has a row, and the difference that feedback makes is paired by seed."""
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    ways = {"baseline": 1.0, "4 bits": 1.01, "4 bits, feedback 8": 1.03, "5 bits": 1.0}
    for seed in (0, 1):
        for name, factor in ways.items():
            finish(study, "dp2", name, seed, factor)
            if name != "5 bits":
                finish(study / "also" / "Muon", "dp4", name, seed, factor)
    (study / "also" / "Muon" / loss_study.COMMANDS).write_text("loss_study.py --muon-lr 0.5\n")
    assert results.main(["--feedback", str(study), "--out", str(out)]) == 0
    text = (out / "feedback.md").read_text()
    gaps = "+1.00 (+1.00 to +1.00) | +3.00 (+3.00 to +3.00) |"
    (loss,) = {row.split(" | ")[3] for row in text.splitlines() if " | dp" in row and gaps in row}
    assert 1.9 < float(loss) < 2.1
    none, two = "+0.00 (+0.00 to +0.00)", "+2.00 (+2.00 to +2.00)"
    assert f"| as above | dp2 | 2 | {loss} | {gaps} - | {none} | - | - | {two} |" in text
    assert f"| Muon | dp4 | 2 | {loss} | {gaps} - | - | - | - | {two} |" in text
    assert "```\nloss_study.py --muon-lr 0.5\n```" in text
    others = json.loads((out / "feedback_others.json").read_text())
    assert others["Muon"]["dp4"]["4 bits, feedback 8"] == "+3.00 (+3.00 to +3.00)"


def test_rounding_chapter(tmp_path: Path) -> None:
    """It needs both measurements, and tells the kinds of which something was never sent."""
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    for seed in (0, 1):
        for name in ("baseline", "4 bits", "4 bits, random"):
            finish(study, "ddp2", name, seed, 1.0)
    assert results.main(["--rounding", str(study), "--out", str(out)]) == 1
    kinds = {
        kind: {"values": 9, "never": never, "missing": 0.25, "error": 0.125, "second": 1.5}
        for kind, never in (("norms", 0.0), ("biases", 0.5), ("matrices", 0.0))
    }
    told = {"steps": 70, "noise": {"norms": 0.75}, "ways": {"4 bits": kinds}}
    (study / "unsent.json").write_text(json.dumps(told))
    assert results.main(["--rounding", str(study), "--out", str(out)]) == 0
    text = (out / "rounding.md").read_text()
    assert "(rounding_ddp2.png)" in text and "| 4 bits, random | 2 |" in text
    assert "| 4 bits | biases | 0.5000 | 0.2500 | 0.1250 | 1.5000 |" in text
    assert "| 4 bits | matrices |" in text and "| norms |" not in text
    assert "norms 0.75" in text and "--steps 70 --bits 4" in text


def islands_of(study: Path, seeds: tuple[int, ...]) -> None:
    """A study of islands: 60 steps, of which 2 bits end a per cent above fp32 and 2 above native.

    The seeds of what is not finished in all are left out.
    """
    for seed in seeds:
        finish(study, "dp2", "baseline", seed, 1.0)
        for name, factor in (("H30 fp32", 1.01), ("H30 2 bits", 1.0201), ("H10 fp32", 1.0)):
            finish(study, "dp2", name, seed, factor)
    finish(study, "dp2", "H10 2 bits", seeds[0], 1.0)


def test_sync_chapter(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out"
    islands_of(study, (0, 1, 2))
    finish(study, "dp2", "baseline", 3, 1.0)  # the next seed has begun
    for seed in (0, 1):
        for name, factor in (("before", 1.0), ("baseline", 1.0), ("H10 4 bits", 1.002)):
            finish(study, "dp2z0", name, seed, factor)
    assert results.main(["--sync", str(study), "--out", str(out)]) == 0
    text = (out / "sync.md").read_text()
    assert "60 steps; the loss" in text
    assert "| H = 30, 3 seeds | - | - | +1.00 ± 0.00 | - |" in text  # of fp32 at the same H
    assert "(+2.01 ± 0.00) | - |" in text  # of native
    assert "| native | 4 | " in text, "each run has its own seeds"
    assert "| H10 4 bits | +0.20 | +0.20 (+0.20 to +0.20) | - | 0 |" in text
    assert "Not measured yet: the time to an equal loss over links." in text
    assert "--layouts dp2 --presets --islands 10 30 --steps 60 --seeds 0 1 2 3" in text
    assert str(tmp_path) not in text
    assert (out / "sync.png").stat().st_size > 10_000
    assert json.loads((out / "sync.json").read_text())["losses"]["H30 2 bits"]["seeds"] == [0, 1, 2]


def test_a_study_without_islands_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert results.main(["--sync", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "in no seed a native run and islands are finished" in capsys.readouterr().err


def test_an_island_is_near_from_the_last_far_meeting_on() -> None:
    gaps = [2.0, 0.3, 0.7, 0.4, -0.9]
    assert continued_islands.meetings_until(np.array(gaps)) == "3"
    assert continued_islands.meetings_until(np.array(gaps[:1])) == "never"
    assert continued_islands.meetings_until(np.array([0.1, 0.2])) == "0"


def speed_of(source: Path) -> None:
    """Turns of native bf16 and ours, as bench_gpu_training.py leaves them."""
    turn = {"kind": "turn", "size": "85M", "layout": "dp2", "part": 0, "sent": 10, "samples": 8}
    (source / "speed.jsonl").write_text(
        "".join(
            json.dumps({**turn, "arm": arm, "round": number, "seconds": [seconds], "loss": 1.0})
            + "\n"
            for number in (-1, 0, 1)
            for arm, seconds in (("native bf16", 0.3), ("compute", 0.1), ("recommended", 0.2))
        )
    )


METHOD = gpu_losses.Method("124M", 60, 8, 1, 3e-4, "linear", "linear", 2, 524288, "text")


def test_gpu_chapter_of_an_earlier_version(tmp_path: Path) -> None:
    """Its trainings lie in folders and read no text on the way; their curves came compressed."""
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "gpu", tmp_path / "out"
    for name, factor in (("baseline", 1.0), ("recommended", 1.002)):
        for seed in (0, 1, 2):
            case = gpu_losses.Case(name, seed)
            folder = case.folder(source / "losses")
            log = write_run(folder, seed, factor, ledger=name != "baseline")
            log.with_suffix(".jsonl.gz").write_bytes(gzip.compress(log.read_bytes()))
            log.unlink()
            settings = gpu_losses.settings_of(case, METHOD, Path("ledger.jsonl"))
            (folder / "done.json").write_text(json.dumps(settings))
    (folder / "loss.jsonl.gz").write_bytes(b"damaged")
    speed_of(source)
    assert results.main(["--gpu", str(source), "--out", str(out)]) == 0
    text = (out / "gpu.md").read_text()
    assert "| `recommended` | 200.0 |" in text and "| recommended | 2 | 2.0" in text
    assert "| +0.20 (+0.20 to +0.20) |" in text and "loss.jsonl.gz: damaged" in text
    assert "not held against NCCL's" in text and "--steps 60 --samples 1" in text
    assert "--seeds 0 1 --out" in text and "undecided" not in text
    figures = json.loads((out / "gpu.json").read_text())
    assert figures["speed"][-1]["r"] == pytest.approx(2.0) and len(figures["loss"]["runs"]) == 2
    assert (out / "gpu_loss.png").stat().st_size > 10_000
    assert results.main(["--gpu", str(tmp_path), "--out", str(out)]) == 1


def evaluated(logs: Path, out: Path, name: str, seed: int, factor: float) -> None:
    """Keep a training whose last steps have read held-out text, as gpu_losses.py does."""
    case = gpu_losses.Case(name, seed)
    log = write_run(case.folder(logs), seed, factor, ledger=name == "recommended")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line.get("step") in (54, 60):
            line["valid_losses"] = [factor * loss for loss in (2.0, 3.0, 2.5)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loss_records.write(out, logs, case, METHOD, {"start": 20.0, "pair": 90.0})


def test_gpu_chapter(tmp_path: Path) -> None:
    """Gap, interval and verdict of what is kept; a damaged file and half a pair are left out."""
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "gpu", tmp_path / "out"
    for seed, gap in ((0, 1.0005), (1, 1.0010), (2, 1.0015), (3, 1.5)):
        evaluated(tmp_path / "logs", source / "losses", "baseline", seed, 1.0)
        evaluated(tmp_path / "logs", source / "losses", "recommended", seed, gap)
        evaluated(tmp_path / "logs", source / "losses", "again", seed, 1.0)
    (source / "losses/recommended.seed3.json.gz").write_bytes(b"damaged")
    assert results.main(["--gpu", str(source), "--out", str(out)]) == 0
    text = (out / "gpu.md").read_text()
    assert "**recommended**: gap +0.100 ± 0.124 % over 3 seeds, wider than the aim of 0.1 %" in text
    assert "undecided: more than 1000 seeds, as the gap lies where the aim does" in text
    row = next(line for line in text.splitlines() if line.startswith("| recommended | 3 | +0"))
    assert row.startswith("| recommended | 3 | +0.100 ± 0.124 | 0.050 | ")
    assert "**again**: gap +0.000 ± 0.000 % over 4 seeds; at most 0.1 %: met." in text
    assert "Left out: recommended.seed3.json.gz: damaged" in text and str(tmp_path) not in text
    assert "seeds 0, 1, 2;" in text and "--steps 60 --samples 8" in text
    found = json.loads((out / "gpu.json").read_text())["gaps"]["recommended"]
    assert found["verdict"] == "undecided" and found["seeds"]["2"]["steps"] == [54, 60]
    assert (out / "gpu_loss.png").stat().st_size > 10_000


def test_without_matplotlib_it_says_so_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        results.main(["--loss", "nowhere"])
    assert "pip install 'matplotlib" in capsys.readouterr().err


def test_missing_and_mixed_measurements_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results.main(["--out", str(tmp_path)]) == 0
    assert (
        "loss: no measurements given (scripts/bench/loss_study.py); missing"
        in capsys.readouterr().out
    )
    assert results.main(["--loss", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "two seeds of a baseline are finished in no layout" in capsys.readouterr().err
    for seed in (0, 1):
        finish(tmp_path, "dp2", "baseline", seed, 1.0)
        finish(tmp_path, "dp2", "mine", seed, 1.0, gradient_clipping=0.5)
    assert results.main(["--loss", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "mine seed 0: other settings: gradient_clipping" in capsys.readouterr().err
