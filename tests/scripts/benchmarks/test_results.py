"""scripts/benchmarks/results.py: chapters from what the measuring scripts left."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.training_bench import gpu_losses, loss_records
from tests.tools.compare.made import write_run


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
        results.main(["--gpu", "nowhere"])
    assert "pip install 'matplotlib" in capsys.readouterr().err


def test_missing_measurements_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main(["--out", str(tmp_path)]) == 0
    said = "speed: no measurements given (scripts/benchmarks/bench_training.py); missing"
    assert said in capsys.readouterr().out
    assert results.main(["--speed", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "bench_training.json is not there" in capsys.readouterr().err
