"""The one command for a GPU: its commands exist, what is done is not repeated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from bench import prove_on_gpu
from bench.bench_gpu_training import EVERY
from bench.prove_on_gpu import Step


def test_scripts_and_their_options_exist(tmp_path: Path) -> None:
    found = list(prove_on_gpu.steps(tmp_path))
    assert len({step.name for step in found}) == len(found)
    assert set(prove_on_gpu.LAYOUTS) == set(EVERY)
    for step in found:
        scripts = [ROOT / word for word in step.command[1:2] if word.endswith(".py")]
        for script in scripts:
            text = script.read_text()
            for word in step.command:
                assert not word.startswith("--") or f'"{word}"' in text or "results" in script.name


def stand_in(folder: Path) -> list[Step]:
    """One that succeeds, one that fails until a file is there, one more."""
    python, there = sys.executable, folder / "there"
    return [
        Step("data", "", 1, (python, "-c", "print('made')")),
        Step("speed", "", 1, (python, "-c", f"open({str(there)!r}); print('fast')")),
        Step("codecs", "", 1, (python, "-c", "print('coded')")),
    ]


def test_it_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_on_gpu, "steps", lambda out: iter(stand_in(tmp_path)))
    out = ["--out", str(tmp_path / "out")]
    assert prove_on_gpu.main(out) == 1
    said = capsys.readouterr()
    assert "FileNotFoundError" in said.out and "[3/3] codecs" in said.out
    assert said.err == "failed, and tried again by the same command: speed\n"
    assert "made" in (tmp_path / "out" / "data.log").read_text()
    (tmp_path / "there").touch()
    assert prove_on_gpu.main(out) == 0
    assert "[1/1] speed" in capsys.readouterr().out
    assert prove_on_gpu.main([*out, "--list"]) == 0
    assert capsys.readouterr().out.count("done") == 3
    assert prove_on_gpu.main([*out, "--again", "--only", "da", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_another_command_of_that_name_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").touch()
    monkeypatch.setattr(prove_on_gpu, "steps", lambda out: iter(stand_in(tmp_path)[:1]))
    out = ["--out", str(tmp_path / "out")]
    prove_on_gpu.main(out)
    changed = Step("data", "", 1, (sys.executable, "-c", "print('anew')"))
    monkeypatch.setattr(prove_on_gpu, "steps", lambda out: iter([changed]))
    assert prove_on_gpu.main(out) == 0
    assert "anew" in (tmp_path / "out" / "data.log").read_text()
