"""The command line, in process and once as a separate process."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.config import CompressionConfig, schema
from hybridcomp.escaping import parsed_json
from hybridcomp.tools.commands import cli
from tests.paths import ROOT

CONFIGS = ROOT / "configs"


def test_validate_prints_the_resolved_table(
    said_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS / "ds_zero2_recommended.json"
    assert cli.main(["validate", str(path), "--world-size", "2", "--no-pipeline"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: valid\n")
    assert "dp            blockint(bits=4)" in out and "error feedback" not in out
    feedback = said_of("validate", {"preset": "recommended", "dp": {"error_feedback": True}})
    assert "less than bf16, error feedback" in feedback


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("ds_*.json"), *CONFIGS.glob("neox/*.yml")]), ids=lambda p: p.stem
)
def test_validate_accepts_every_committed_file(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--no-moe", "--pipeline" if "pipe" in path.stem else "--no-pipeline"]
    assert cli.main(["validate", str(path), *(flags if path.suffix == ".json" else [])]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith((f"{path}: valid\n", f'{path}: there is no "compression" block'))


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
        (
            {"zero_optimization": {"stage": 1, "compression": {"dp": "bf16"}}}, [],
            "zero_optimization.compression: found 'a block where nothing reads it'",
        ),
        (
            {"deepspeed": "configs/zero2.json", "bf16": True, "compression": {"dp": "bf16"}}, [],
            'deepspeed: found "configs/zero2.json"; a trainer\'s file; give the DeepSpeed file',
        ),
        (
            {"deepspeed_extra_args": {"compression": {"dp": "rdx"}}}, [],
            "compression.dp.codec: found",
        ),
        (
            {
                "deepspeed_extra_args": {"compression": {"tp": "bf16"}},
                "model_parallel_size": 2, "te_mha": True,
            },
            [],
            "compression.tp: found layers of Transformer Engine",
        ),
        (
            {"compression": {"dp": "bf16", "ledger": "ledger.jsonl"}}, [],
            'expected an object; write {"jsonl": "ledger.jsonl"}',
        ),
        (
            {"train_batch_size": 8, "dp": "bf16"}, [],
            'dp: found "bf16"; DeepSpeed ignores it here; put it into "compression"',
        ),
        (
            {"dp": "blockint", "hierarchy": [8, 4]}, ["--world-size", "48"],
            "compression.hierarchy: found [8, 4]; the job has 6 nodes, no multiple of 4",
        ),
    ],
)  # fmt: skip
def test_validate_refuses_in_one_line(
    content: Any, flags: list[str], fragment: str, said_of: Callable[..., str]
) -> None:
    error = said_of("validate", content, *flags, status=cli.BAD_INPUT)
    assert fragment in error and error.count("\n") == 1


def test_validate_says_that_a_ledger_cannot_be_written(
    tmp_path: Path, said_of: Callable[..., str]
) -> None:
    to = f"{tmp_path}/none/ledger.jsonl"  # the folder would be created
    said = said_of("validate", {"dp": "bf16", "ledger": {"jsonl": to}})
    assert "cannot be written" not in said
    said = said_of("validate", {"dp": "bf16", "ledger": {"jsonl": str(tmp_path)}})
    assert f"compression.ledger.jsonl: {tmp_path} cannot be written here (Is a directory)" in said


@pytest.mark.parametrize(
    ("content", "words", "fragment"),
    [
        ({"preset": "recommended", "tp": "none"}, [], "valid (a bare block)"),
        ({"train_batch_size": 8}, [], 'there is no "compression" block'),
        (
            {"train_batch_size": 8, "pipeline": {"stages": "auto"}}, [],  # DeepSpeed's pipeline
            'there is no "compression" block',
        ),
        (
            {"compression": {"preset": "recommended", "enabled": False}}, [],
            "the block is not enabled",
        ),
        (
            '{"compression": {"dp": "bf16"} // gradients\n}', [],
            "Hugging Face's Trainer and Accelerate read JSON only",
        ),
        (
            {"bf16": {"enabled": True}, "compression": {"preset": "zhybrid"}}, [],
            "note: zero, tp, pp: zfp(rate=16) takes 16 bits a value and saves nothing",
        ),
        ({"compression": {"preset": "zhybrid"}}, ["1"], "note: dp, zero, tp, pp: one rank"),
        ({"aio": {"use_gds": True}, "compression": {"dp": "bf16"}}, [], ": valid"),  # of a GPU job
        (
            {"dp": "blockint", "hierarchy": [8, 4]}, ["64"], "nodes of 8 ranks, units of 4 nodes",
        ),
    ],
)  # fmt: skip
def test_validate_says_what_a_file_means(
    content: Any, words: list[str], fragment: str, said_of: Callable[..., str]
) -> None:
    ranks = ["--world-size", *words] if words else []
    assert fragment in said_of("validate", content, *ranks)


def test_validate_names_the_file_of_a_plans_block(
    tmp_path: Path, said_of: Callable[..., str]
) -> None:
    block = tmp_path / "compression.json"
    block.write_text('{"dp": "bf16"}')
    said = said_of("validate", {"sharding": "sharding.py"})
    assert said.endswith(
        f"native unless HYBRIDCOMP_CONFIG names {block}: hybridcomp validate {block}\n"
    )


@pytest.mark.parametrize(
    ("content", "start"),
    [
        ({"compression": {"dp": "bf16"}}, "deepspeed --module hybridcomp.run SCRIPT"),
        ({"deepspeed_extra_args": {"compression": {"dp": "bf16"}}}, "-m hybridcomp.patches.neox"),
        ({"dp": "bf16"}, "HYBRIDCOMP_CONFIG="),
    ],
)
def test_validate_ends_with_the_command_that_starts_the_job(
    content: Any, start: str, tmp_path: Path, said_of: Callable[..., str]
) -> None:
    _, _, end = said_of("validate", content).partition("start with  ")
    assert start in end and str(tmp_path / "ds_config.json") in end
    assert end.endswith("started in another way, the job compresses nothing\n")


def test_validate_says_what_a_resumed_job_takes_over(
    tmp_path: Path, said_of: Callable[..., str]
) -> None:
    feedback = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}}
    folder, other = tmp_path / "run" / "global_step5", tmp_path / "plain"
    other.mkdir()
    config = CompressionConfig.parse(feedback)
    checkpoint_note.write(folder, config, 5, 1, [checkpoint_note.RESIDUALS])
    (tmp_path / "run" / "latest").write_text("global_step5")
    words = ["--checkpoint", str(tmp_path / "run")]
    job = {"compression": {**feedback, "min_bytes": 7}}
    lacking = said_of("validate", job, *words, status=cli.BAD_INPUT)
    assert "no hybridcomp_residuals_rank_00000.pt" in lacking
    (folder / "hybridcomp_residuals_rank_00000.pt").touch()
    out = said_of("validate", job, *words)
    assert f"checkpoint {folder}: step 5 of 1 ranks" in out
    assert "note: compression.min_bytes is 7, and was 65536 in that run" in out
    assert "takes over: what error feedback has left out so far" in out and "WARNING" not in out
    for content in ({"train_batch_size": 8}, {"compression": {"dp": "bf16"}}):
        assert "WARNING" in said_of("validate", content, *words)
    plain = said_of("validate", job, "--checkpoint", str(other))
    assert "residuals start at zero" in plain
    none = ["--checkpoint", str(tmp_path / "no")]
    error = said_of("validate", job, *none, status=cli.BAD_INPUT)
    assert "expected the folder of a checkpoint" in error


def assert_has_seams(shown: str) -> None:
    head, *rows = shown.splitlines()
    assert head.split() == ["dimension", "what", "upstream"]
    assert {"offload", "tp"} <= {row.split()[0] for row in rows}
    assert "`" not in shown and "|" not in shown, "Markdown is for pages"


def test_seams_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["seams"]) == 0
    assert_has_seams(capsys.readouterr().out)


def without_deepspeed(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run commands as without DeepSpeed installed; their outputs are divided by ``=========``."""
    code = (
        "import json, sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] != 'deepspeed':\n"
        "            return self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
        "from hybridcomp.tools.commands.cli import main\n"
        "for words in json.loads(sys.argv[1]): assert main(words) == 0; print('=' * 9)\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.nightly
def test_seams_are_listed_and_files_validated_without_deepspeed() -> None:
    file = str(CONFIGS / "ds_zero3_recommended.json")
    found = without_deepspeed(["seams"], ["validate", file])
    assert found.returncode == 0, found.stderr
    seams, valid, _ = found.stdout.split("=" * 9)
    assert_has_seams(seams)
    assert "importing torch" in found.stderr
    assert f"{file}: valid" in valid
    assert "note: DeepSpeed is not installed here: the file is read as 0.19.8" in valid


@pytest.mark.nightly
def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m hybridcomp.tools.commands.cli schema | head -n 1"
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "{\n", "")


def test_schema_is_printed_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_missing_file_and_missing_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", str(tmp_path / "no.json")]) == cli.BAD_INPUT
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yml", "compression:\n  dp: rdx\n", "compression: found a block at the top of a"),
        (
            "a.yml",
            "pipe_parallel_size: 2\nnum-layers: 4\ncompression:\n  dp: bf16\n",
            "move it to deepspeed_extra_args.compression",
        ),
        (
            "a.json",
            '{"pipe_parallel_size": 2, "compression": {"dp": "bf16"}}',
            "move it to deepspeed_extra_args.compression",
        ),
        (
            "a.yml",
            "num_layers: 4\ndeepspeed_extra_args:\n  compression:\n"
            "    dp: {codec: blockint, bits: 40}\n",
            "compression.dp.bits: found 40",
        ),
        ("a.yml", "dp:\n  - 4\n", "compression.dp: found [4]"),
        ("a.yml", "dp:\n  codec: blokint\n", "did you mean 'blockint'"),
        ("a.yml", "a: [1\n", "expected valid YAML"),
        ("a.yml", "- 1\n- 2\n", "found 'list'"),
        (
            "a.json",
            '{"zero_optimisation": {"stage": 3}, "compression": {"dp": "bf16"}}',
            'zero_optimisation: found {"stage": 3}; DeepSpeed ignores a key that it does not know; '
            "did you mean 'zero_optimization'?",
        ),
        ("a.json", '{"zero_optimisation": {}, "train_batch_size": 8}', "'zero_optimization'?"),
        (
            "a.json",
            '{"gradient_acumulation_steps": 8, "compression": {"dp": "bf16"}}',
            "did you mean 'gradient_accumulation_steps'?",
        ),
        (
            "a.yml",
            "num_layers: 2\ndeepspeed_extra_arg:\n  compression: {dp: bf16}\n",
            "did you mean 'deepspeed_extra_args'?",
        ),
        ("a.yml", "deepspeed_extra_args: 3\n", "deepspeed_extra_args: found 3; expected an object"),
        (
            "a.yml",
            "deepspeed_extra_args: {compression: {dp: bf16}}\npipe_parallel_size: two\n",
            'pipe_parallel_size: found "two"; expected a whole number',
        ),
        *(
            (
                "a.yml",
                f"deepspeed_extra_args: {{compression: {{dp: bf16}}}}\n{key}: {found}\n",
                f"{key}: found {found}; expected a whole number of {least} or more",
            )
            for key, found, least in (
                ("pipe_parallel_size", -1, 0),
                ("model_parallel_size", -2, 0),
                ("num_layers", 0, 1),
                ("hidden_size", -64, 1),
            )
        ),
    ],
)
def test_validate_finds_the_right_line(
    name: str, text: str, said: str, said_of: Callable[..., str]
) -> None:
    """YAML blocks had been read as Hjson, and keys that DeepSpeed ignores were accepted."""
    pytest.importorskip("yaml")
    error = said_of("validate", text, status=cli.BAD_INPUT, file=name)
    assert said in error and error.count("\n") == 1


def test_a_byte_order_mark_is_no_mistake(said_of: Callable[..., str]) -> None:
    """It made JSON "Hjson", or was refused with a wrong reason, by readers of any kind of file."""
    said = said_of("validate", '\ufeff{"compression": {"dp": "bf16"}}', file="a.json")
    assert ": valid\n" in said and "byte order mark" in said and "Hjson" not in said
    assert "Hjson" in said_of("validate", '\ufeff{"compression": {"dp": "bf16",}}', file="a.json")
    assert parsed_json('\ufeff{"a": 1}') == {"a": 1}


def test_validate_reads_yaml_in_blocks(said_of: Callable[..., str]) -> None:
    pytest.importorskip("yaml")
    text = (
        "num-layers: 4\npipe-parallel-size: 2\ndeepspeed-extra-args:\n  compression:\n"
        "    dp:\n      codec: blockint\n      bits: 4  # as planned\n"
    )
    said = said_of("validate", text, file="neox.yml")
    assert ": valid\n" in said and "blockint(bits=4)" in said
    assert "python -m hybridcomp.patches.neox" in said
    block = said_of("validate", "preset: recommended\ntp: none\n", file="block.yaml")
    assert "valid (a bare block)" in block


def test_keys_of_deepspeed_are_not_taken_for_misspelt_ones(said_of: Callable[..., str]) -> None:
    keys = {
        "gradient_accumulation_dtype": "fp32", "bfloat16": {}, "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True, "gradient_predivide_factor": 1.0,
        "zero_force_ds_cpu_optimizer": False, "train_micro_batch_size": 4, "steps_per_print": 10,
        "data_types": {}, "communication_data_type": "fp32", "prescale_gradients": False,
        "checkpoint": {}, "compile": {}, "pipeline": {}, "activation_checkpointing": {},
        "wall_clock_breakdown": False,
    }  # fmt: skip
    assert said_of("validate", {"compression": {"dp": "bf16"}, **keys})


def test_help_needs_no_torch() -> None:
    """``hybridcomp`` alone, and each ``--help``, answer at once."""
    code = (
        "import sys; from hybridcomp.tools.commands import cli; cli._parser(); "
        "sys.exit(' '.join({'torch', 'pydantic', 'deepspeed'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_says_what_hybridcomp_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "compresses the network traffic of distributed training" in said and "`" not in said


def test_the_page_of_commands_has_those_of_the_command_line() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    on_page = set(
        re.findall(
            r"^\| `(?:hybridcomp |python -m hybridcomp\.(?:tools\.|patches\.)?)(\w+)", page, re.M
        )
    )
    choices = next(one.choices for one in cli._parser()._actions if one.dest == "==SUPPRESS==")
    assert choices is not None and on_page - {"run", "neox"} == set(choices)


def test_an_interrupted_command_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridcomp.tools.commands.validate.lines", interrupted)
    assert cli.main(["validate", "ds_config.json"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "hybridcomp: interrupted\n"


def test_a_full_disk_is_named_by_where_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "the file that is copied")

    monkeypatch.setattr(shutil, "copyfile", full)
    words = ["configs", "ds_zero1_recommended", "--to", str(tmp_path)]
    assert cli.main(words) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith(f"hybridcomp: {tmp_path}: No space left on device; make room")
