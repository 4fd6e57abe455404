"""``hybridcomp compare --launch``: started commands, and runs that are not repeated."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.tools.commands import cli
from hybridcomp.tools.compare import CompareError
from hybridcomp.tools.compare.launch import RunPlan, armed, block_of, config_of

#: a single-process trainer that learns better without compression, and counts its runs
TRAINER = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--seed", type=int)
parser.add_argument("--log")
found = parser.parse_args()
settings = json.load(open(found.deepspeed_config))
factor = 1.02 if "compression" in settings else 1.0
with open(found.log, "w") as file:
    print(json.dumps({"run": {"seed": found.seed}}), file=file)
    for step in range(1, 41):
        loss = factor * (2 + found.seed + 1 / step)
        print(json.dumps({"step": step, "tokens": step, "loss": loss}), file=file)
with open("started.txt", "a") as file:
    print(os.environ["WANDB_RUN_GROUP"], found.seed, factor, file=file)
"""


def launcher(folder: Path, said: str = 'shift 2; exec python "$@"') -> str:
    """Write a launcher, which leaves out ``-m hybridcomp.run`` and its import of torch."""
    file = folder / "torchrun"
    file.write_text(f"#!/bin/sh\n{said}\n")
    file.chmod(0o755)
    return str(file)


def test_launched_resumed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("trainer.py").write_text(TRAINER)
    Path("ds.json").write_text(json.dumps({"steps_per_print": 5, "compression": {"dp": "bf16"}}))
    arguments = [
        "compare", "--launch", "--candidate", 'mine={"dp": "fp16"}', "--seeds", "0", "1",
        "--out", "out", "--wandb", "none", "--wandb-group", "club", "--",
        launcher(tmp_path), "trainer.py", "--deepspeed_config", "ds.json", "--seed", "{seed}",
        "--log", "{folder}/loss.jsonl",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    started = Path("started.txt").read_text().splitlines()
    assert started == ["club 0 1.0", "club 0 1.02", "club 1 1.0", "club 1 1.02"]
    rows = json.loads(Path("out/comparison.json").read_text())["runs"]
    assert [row["label"] for row in rows] == ["baseline", "mine"]
    assert rows[1]["gap"] == pytest.approx(2.0) and rows[1]["seeds"] == [0, 1]
    block = json.loads(Path("out/mine/seed1/ds_config.json").read_text())["compression"]
    assert block["dp"] == "fp16" and block["ledger"]["jsonl"].endswith("mine/seed1/ledger.jsonl")
    capsys.readouterr()
    (tmp_path / "out/mine/seed1/done.json").unlink()
    assert cli.main(arguments) == 0
    assert len(Path("started.txt").read_text().splitlines()) == 5
    assert "1/4 baseline seed 0: there already" in capsys.readouterr().err
    arguments.remove("1")
    assert cli.main(arguments) == 0
    rows = json.loads(Path("out/comparison.json").read_text())["runs"]
    assert rows[1]["seeds"] == [0], "not those of earlier calls"
    (tmp_path / "out/mine/seed0/done.json").unlink()
    Path("trainer.py").write_text("")
    capsys.readouterr()
    assert cli.main(arguments) == cli.BAD_INPUT, "it logs nothing; an earlier log is not its"
    assert "mine/seed0: found no run in this folder" in capsys.readouterr().err


def plan(folder: Path, *command: str, **kwargs: Any) -> RunPlan:
    blocks: dict[str, Any] = {"baseline": None, "mine": {"dp": "bf16"}}
    return RunPlan(command, blocks, kwargs.pop("seeds", [0]), folder / "out", **kwargs)


def test_any_deepspeed_command_is_recorded_by_its_engine(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"wandb": {"team": "t"}}))
    made = plan(
        tmp_path, "deepspeed", "--num_gpus", "2", "train.py", f"--deepspeed_config={source}",
        project="p", group="g",
    )  # fmt: skip
    base, mine = made.jobs()
    assert list(mine.command[:6]) == [
        "deepspeed", "--num_gpus", "2", "--module", "hybridcomp.run", "train.py",
    ]  # fmt: skip
    config = mine.command[6].removeprefix("--deepspeed_config=")
    assert config == str(mine.folder / "ds_config.json")
    settings = json.loads(Path(config).read_text())
    assert settings["wandb"] == {"enabled": True, "project": "p", "group": "g", "team": "t"}
    assert settings["compression"]["dp"] == "bf16"
    assert "compression" not in json.loads((base.folder / "ds_config.json").read_text())
    assert base.environment["HYBRIDCOMP_RECORD"] == str(base.folder / "loss.jsonl")


def test_a_job_without_deepspeed_gets_its_block_by_the_environment(tmp_path: Path) -> None:
    base, mine = plan(tmp_path, "torchrun", "pretrain_gpt.py", "--seed", "1").jobs()
    assert list(mine.command[:3]) == ["torchrun", "-m", "hybridcomp.run"]
    block = json.loads(Path(mine.environment["HYBRIDCOMP_CONFIG"]).read_text())
    assert block["dp"] == "bf16"
    assert "HYBRIDCOMP_CONFIG" not in base.environment


def test_commands() -> None:
    assert config_of(["a", "--deepspeed_config", "b.json"]) == (2, "", "b.json")
    assert config_of(["a", "--deepspeed_config"]) is None
    trainer = ["accelerate", "launch", "run_clm.py", "--deepspeed", "b.json"]
    assert config_of(trainer) == (4, "", "b.json")
    assert config_of(["run_clm.py", "--deepspeed=b.json"]) == (1, "--deepspeed=", "b.json")
    assert config_of(["x.py", "--deepspeed", "--seed", "1"]) is None
    assert armed(trainer)[2:5] == ["-m", "hybridcomp.run", "run_clm.py"]
    words = ["deepspeed", "--module", "hybridcomp.run", "x.py"]
    assert armed(words) == words
    for command in (["deepspeed", "--module", "mine"], ["./start.sh", "x.py"]):
        with pytest.raises(CompareError, match="found no place for hybridcomp"):
            armed(command)


def test_blocks(tmp_path: Path) -> None:
    assert block_of("recommended") == ("recommended", {"preset": "recommended"})
    assert block_of('a={"dp": "bf16"}') == ("a", {"dp": "bf16"})
    file = tmp_path / "mine.json"
    file.write_text('{"compression": {"dp": "mpc"}, "train_batch_size": 8}')
    assert block_of(f"b={file}") == ("b", {"dp": "mpc"})
    assert block_of(str(file)) == ("mine", {"dp": "mpc"})
    with pytest.raises(ConfigError, match='compression.preset: found "zybrid"'):
        block_of("zybrid")
    with pytest.raises(CompareError, match="expected JSON"):
        block_of("a={dp")
    with pytest.raises(CompareError, match="another name"):
        block_of("baseline=zhybrid")
    for name in ("../over", "a/b", "..", ".", "/tmp/x"):
        with pytest.raises(CompareError, match="names the folder of its runs"):
            block_of(f"{name}=zhybrid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launch", "--candidate", "zhybrid"], "then -- and a command"),
        (["--launch", "--", "deepspeed", "x.py"], "at least one --candidate"),
        (["a", "b", "--candidate", "zhybrid"], "--candidate: found no --launch"),
        (["a", "b", "--seeds", "1", "2"], "--seeds: found no --launch"),
        (["--launch", "--candidate", "zhybrid", "--", "no-such-command", "x.py"], "no such comm"),
        (
            ["--launch", "--candidate", "zhybrid", "--seeds", "0", "1", "--", "python3", "x.py"],
            "a command without {seed}",
        ),
        (
            ["--launch", "--candidate", "zhybrid", "--", "python3", "x.py", "--deepspeed_config=n"],
            "n: expected a DeepSpeed file",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *arguments]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["[1]", "null", '{"wandb": true}'])
def test_a_file_that_holds_no_settings_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    words = ["compare", "--launch", "--candidate", "recommended", "--out", str(tmp_path / "out")]
    command = [sys.executable, "trainer.py", "--deepspeed_config", str(file)]
    assert cli.main([*words, "--wandb", "none", "--", *command]) == cli.BAD_INPUT
    told = capsys.readouterr().err.rstrip("\n")
    assert told.startswith(f"hybridcomp: {file}: expected a DeepSpeed file in JSON, an object")
    assert "\n" not in told


@pytest.mark.nightly
def test_a_failure_shows_the_end_of_the_output(tmp_path: Path) -> None:
    """The real ``python -m hybridcomp.run``."""
    script = "import sys; print('hybridcomp' in sys.modules, 'the reason'); raise SystemExit(3)"
    Path(tmp_path, "x.py").write_text(script)
    job, _ = plan(tmp_path, sys.executable, str(tmp_path / "x.py")).jobs()
    with pytest.raises(CompareError, match=r"True the reason\nbaseline seed 0: status 3"):
        job.run()
    assert not (job.folder / "done.json").exists()


SAID = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 10, in <module>
[rank1]: ValueError: a batch is missing
[rank0]: RuntimeError: Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


@pytest.mark.parametrize(("said", "why"), [
    (SAID, "status 1: [rank1]: ValueError: a batch is missing;"),
    (f"[default1]:{SAID.lstrip().splitlines()[-4]}", "status 1: [default1]:[rank1]: ValueError: a"),
    ("hybridcomp: compression.dp.bits: found 16\n", "status 1: hybridcomp: compression.dp.bits: f"),
    ("step 1: Error rates\nno error: here", "status 1;"),
])  # fmt: skip
def test_a_failure_names_the_rank_that_failed_first(tmp_path: Path, said: str, why: str) -> None:
    command = launcher(tmp_path, f"printf '%s\\n' {shlex.quote(said)}; exit 1")
    job, _ = plan(tmp_path, command, "x.py").jobs()
    with pytest.raises(CompareError) as error:
        job.run()
    assert str(error.value).splitlines()[-1].startswith(f"baseline seed 0: {why}")


@pytest.mark.parametrize("content", [b"", b'{"command": [', b"\xff", b"[1]"])
def test_a_note_that_was_cut_is_no_finished_training(tmp_path: Path, content: bytes) -> None:
    job, _ = plan(tmp_path, launcher(tmp_path, "exit 0"), "x.py").jobs()
    (job.folder / "done.json").write_bytes(content)
    assert job.run() is not None
    assert job.run() is None
