"""The command line, in process and once as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridcomp import cli
from tests.paths import ROOT

CONFIGS = ROOT / "configs"


def write(folder: Path, content: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_validate_prints_the_resolved_table(capsys: pytest.CaptureFixture[str]) -> None:
    path = CONFIGS / "ds_zero2_recommended.json"
    assert cli.main(["validate", str(path), "--world-size", "2", "--no-pipeline"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: valid, digest ")
    assert "dp            blockint(bits=4)" in out
    assert "error feedback" in out


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("ds_*.json")), ids=lambda p: p.stem)
def test_validate_accepts_every_committed_file(path: Path) -> None:
    flags = ["--pipeline"] if "pipe" in path.stem else ["--no-pipeline"]
    assert cli.main(["validate", str(path), "--no-moe", *flags]) == 0


@pytest.mark.parametrize(
    ("content", "flags", "fragment"),
    [
        ({"compression": {"dp": "rdx"}}, [], "hybridcomp: compression.dp.codec: found"),
        ({"compression": {"pp": "mpc"}}, ["--no-pipeline"], "compression.pp: found a model that"),
        ({"compression": {"ep": "mpc"}}, ["--no-moe"], "compression.ep: found a model without"),
        ({"dp": "bf16", "min_bytes": -1}, [], "compression.min_bytes: found -1"),
        (
            {
                "compression": {"dp": "bf16"},
                "zero_optimization": {"stage": 1, "reduce_scatter": False},
            },
            [],
            'compression.dp: found "zero_optimization.reduce_scatter": false',
        ),
    ],
)
def test_validate_refuses_in_one_line(
    content: Any,
    flags: list[str],
    fragment: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["validate", write(tmp_path, content), *flags]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert fragment in captured.err


def test_validate_bare_block_and_no_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", write(tmp_path, {"preset": "recommended", "tp": "none"})]) == 0
    assert "valid (a bare block)" in capsys.readouterr().out
    assert cli.main(["validate", write(tmp_path, {"train_batch_size": 8})]) == 0
    assert 'there is no "compression" block' in capsys.readouterr().out
    off = {"compression": {"preset": "recommended", "enabled": False}}
    assert cli.main(["validate", write(tmp_path, off)]) == 0
    assert "the block is not enabled" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("neox/*.yml")), ids=lambda p: p.stem)
def test_validate_reads_the_block_of_a_gpt_neox_file(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", str(path)]) == 0
    assert f"{path}: valid, digest " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (
            {"zero_optimization": {"stage": 1, "compression": {"dp": "bf16"}}},
            "zero_optimization.compression: found 'a block where nothing reads it'",
        ),
        ({"deepspeed_extra_args": {"compression": {"dp": "rdx"}}}, "compression.dp.codec: found"),
        (
            {
                "deepspeed_extra_args": {"compression": {"tp": "bf16"}},
                "model_parallel_size": 2, "te_mha": True,
            },
            "compression.tp: found layers of Transformer Engine",
        ),
    ],
)  # fmt: skip
def test_validate_finds_blocks_that_are_elsewhere(
    content: Any, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", write(tmp_path, content)]) == cli.BAD_INPUT
    assert fragment in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m hybridcomp.cli schema | head -n 1"
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "{\n", "")


def test_validate_shows_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"bf16": {"enabled": True}, "compression": {"preset": "zhybrid"}}
    assert cli.main(["validate", write(tmp_path, content), "--world-size", "1"]) == 0
    out = capsys.readouterr().out
    assert "note: zero, tp, pp: zfp(rate=16) takes 16 bits a value and saves nothing" in out
    assert "note: dp, zero, tp, pp: one rank" in out


def test_schema_is_what_is_committed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    committed = (CONFIGS / "compression.schema.json").read_text()
    assert json.loads(capsys.readouterr().out) == json.loads(committed)


def test_missing_file_and_missing_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", str(tmp_path / "no.json")]) == cli.BAD_INPUT
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


def test_process_validates_without_deepspeed() -> None:
    code = (
        "import sys; from hybridcomp.cli import main\n"
        "status = main(['validate', sys.argv[1]])\n"
        "assert 'deepspeed' not in sys.modules\n"
        "raise SystemExit(status)\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code, str(CONFIGS / "ds_zero3_recommended.json")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.returncode == 0, result.stderr
    assert "valid" in result.stdout
