"""Files of ``accelerate config``: Accelerate's settings from them, and rejected files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import accelerate
from hybridcomp.tools.commands import cli
from hybridcomp.tools.commands.job_files import read_job_file

pytest.importorskip("yaml")

SETTINGS: dict[str, Any] = {
    "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 4, "compression": {"preset": "recommended"},
}  # fmt: skip


def written(folder: Path, **keys: Any) -> Path:
    """Write an Accelerate file with these keys; JSON is YAML."""
    path = folder / "default_config.yaml"
    path.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", **keys}))
    return path


def test_the_file_that_it_names_is_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SETTINGS))
    named = {"deepspeed_config_file": "ds.json"}
    path = written(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=named)
    monkeypatch.chdir(tmp_path)
    found = read_job_file(path)
    assert (found.whose, found.job.stage, found.dtype) == ("accelerate", 2, "bf16")
    assert found.accumulation == 1, "Accelerate's default"
    assert cli.main(["validate", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{path}: valid" in said
    assert f"start with  accelerate launch --config_file {path} -m hybridcomp.run" in said
    assert cli.main(["pays", str(path)]) == 0
    assert capsys.readouterr().out.startswith("bf16 messages among 8 ranks, ZeRO 2")
    later = {"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps({**SETTINGS, **later}))
    job = read_job_file(path).job
    assert (job.stage, job.dtype) == (2, "fp32"), "Accelerate's defaults"


@pytest.mark.parametrize(
    ("section", "precision", "stage", "dtype", "offload"),
    [
        ({}, None, 2, "fp32", False),
        ({"zero_stage": "3", "gradient_accumulation_steps": "4"}, "bf16", 3, "bf16", False),
        ({"zero_stage": 1, "offload_optimizer_device": "CPU"}, "fp16", 1, "fp16", True),
        ({"zero_stage": 0}, False, 0, "fp32", False),  # an unquoted `no`
        ({"deepspeed_config_file": "none"}, "fp8", 2, "bf16", False),
    ],
)
def test_settings_of_its_own(
    tmp_path: Path, section: dict[str, Any], precision: Any, stage: int, dtype: str, offload: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = written(
        tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section,
        **({} if precision is None else {"mixed_precision": precision}),
    )  # fmt: skip
    found = read_job_file(path)
    assert (found.job.stage, found.job.dtype, found.job.cpu_offload) == (stage, dtype, offload)
    assert found.accumulation == (4 if "gradient_accumulation_steps" in section else None)
    assert cli.main(["pays", str(path)]) == 0
    assert "has no block" in capsys.readouterr().out
    assert cli.main(["validate", str(path)]) == 0
    assert 'add "compression"' in (said := capsys.readouterr().out)
    assert "to the JSON file that deepspeed_config_file names" in said


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"distributed_type": "FSDP"}, "distributed_type", "HYBRIDCOMP_CONFIG"),
        ({"compression": {}, "distributed_type": "DEEPSPEED"}, "compression", "hands no block on"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"compression": {}}},
            "deepspeed_config.compression", "hands no block on",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "two"}},
            "deepspeed_config.zero_stage", "0, 1, 2 or 3",
        ),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
             "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            "mixed_precision", "refuses it beside",
        ),
        (
            {"distributed_type": "DEEPSPEED",
             "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 3}},
            "deepspeed_config.zero_stage", "refuses it beside",
        ),
        (
            {"distributed_type": "DEEPSPEED",
             "deepspeed_config": {"deepspeed_config_file": "absent.json"}},
            "deepspeed_config.deepspeed_config_file", "existing file",
        ),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": 3}, "deepspeed_config", "an object"),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "fp64"},
            "mixed_precision", "expected one of",
        ),
    ],
)  # fmt: skip
def test_what_cannot_act_is_one_line(
    tmp_path: Path, keys: dict[str, Any], key: str, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = written(tmp_path, **keys)
    assert cli.main(["validate", str(path)]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith(f"hybridcomp: {key}: ") and words in said and said.count("\n") == 1, said


def test_a_named_file_without_zero_is_refused_as_accelerate_does(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    named = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    with pytest.raises(ConfigError, match="zero_optimization"):
        accelerate.ds_settings({"distributed_type": "DEEPSPEED", "deepspeed_config": named})
