"""scripts/benchmarks/loss_study.py: what it trains, what it does not train again, how it fails."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loss_study
from hybridcomp.tools.compare import CompareError, launch


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    (tmp_path / "text_train.idx").touch()
    return loss_study.parse(
        ["--data", str(tmp_path / "text"), "--out", str(tmp_path / "out"), *arguments]
    )


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of trainings from now on, none of which is run."""
    commands: list[list[str]] = []

    def run(command: list[str], *_: Any, **__: Any) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(launch, "run_logged", run)
    return commands


def test_whole_seeds_come_first_and_baselines_lead(tmp_path: Path) -> None:
    found = options(tmp_path, "--seeds", "3", "4", "--presets", "zhybrid")
    cases = [(case.seed, case.layout, case.name) for case in loss_study.cases_of(found)]
    layouts = [(seed, layout) for seed in (3, 4) for layout in ("dp2", "pp2")]
    assert cases == [(*key, name) for key in layouts for name in ("baseline", "zhybrid")]


def test_peers_are_trained_where_there_is_data_parallelism_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = recorded(monkeypatch)
    found = options(tmp_path, "--seeds", "3", "--presets", "--peers", "qgz")
    cases = list(loss_study.cases_of(found))
    assert [(case.layout, case.name) for case in cases] == [
        ("dp2", "baseline"), ("dp2", "peer qgz"), ("pp2", "baseline"),
    ]  # fmt: skip
    assert loss_study.train(cases[1], found) is not None
    assert commands[0][-2:] == ["--method", "qgz"] and "hybridcomp.run" not in commands[0]
    assert any(word.endswith("train_peer.py") for word in commands[0])


def test_torchs_engines_have_torchs_launcher_and_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], output: Path, environment: dict[str, str], **_: Any) -> int:
        seen.append((command, environment))
        return 0

    monkeypatch.setattr(launch, "run_logged", run)
    monkeypatch.delenv("HYBRIDCOMP_CONFIG", raising=False)
    layouts = ["--layouts", "ddp2", "fsdp2", "--seeds", "3", "--presets"]
    found = options(tmp_path, *layouts, "--peers", "bf16", "powersgd-4")
    cases = list(loss_study.cases_of(found))
    assert [(case.layout, case.name) for case in cases] == [
        ("ddp2", "baseline"), ("ddp2", "peer bf16"), ("ddp2", "peer powersgd-4"),
        ("fsdp2", "baseline"), ("fsdp2", "peer bf16"),
    ]  # fmt: skip
    loss_study.train(cases[1], found)
    loss_study.train(loss_study.Case("fsdp2", "mine", {"dp": "bf16"}, 3), found)
    (peer, native), (ours, told) = seen
    assert peer[0] == "torchrun" and peer[-4:] == ["--engine", "ddp", "--method", "bf16"]
    assert "HYBRIDCOMP_CONFIG" not in native
    place = ours.index("-m")
    assert ours[place : place + 3] == ["-m", "--", "hybridcomp.run"]
    assert ours[-2:] == ["--engine", "fsdp2"] and told["HYBRIDCOMP_CONFIG"].endswith("config.json")
    with pytest.raises(SystemExit):
        options(tmp_path, *layouts, "--peers", "qgz")
    assert "no layout of ddp2 fsdp2 has 'qgz'" in capsys.readouterr().err


def test_runs_go_on_from_the_checkpoint_of_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = recorded(monkeypatch)
    words = ["--layouts", "dp2z0", "--presets", "--islands", "30", "--seeds", "3"]
    found = options(tmp_path, *words, "--after", "40", "--steps", "20")
    cases = list(loss_study.cases_of(found))
    names = ["before", "baseline", *(f"H30 {form}" for form in ("fp32", "8 bits", "4 bits"))]
    assert [case.name for case in cases][:5] == names
    for case in cases[:3]:
        loss_study.train(case, found)
    kept = str(cases[0].folder(found.out) / "checkpoint")
    before, native, islands = commands
    assert before[-4:] == ["--steps", "40", "--save", kept] and "hybridcomp.run" not in before
    assert native[-2:] == islands[-2:] == ["--load", kept]
    assert native[native.index("--steps") + 1] == "60" and "hybridcomp.run" in islands
    files = [case.folder(found.out) / "ds_config.json" for case in cases[:2]]
    settings = [json.loads(file.read_text()) for file in files]
    assert settings[0] == settings[1]  # one schedule over both
    assert settings[0]["scheduler"]["params"]["total_num_steps"] == 60
    with pytest.raises(SystemExit):
        options(tmp_path, "--after", "40")
    assert "--after: expected --layouts dp2z0" in capsys.readouterr().err


def test_other_sizes_and_muon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = recorded(monkeypatch)
    words = ["--layouts", "dp4", "--presets", "--seeds", "3", "--lr", "0.001"]
    words += ["--muon-lr", "0.02", "--model", "6", "384", "8"]
    found = options(tmp_path, *words)
    case = next(loss_study.cases_of(found))
    loss_study.train(case, found)
    size = commands[0].index("--layers")
    assert commands[0][size:] == ["--layers", "6", "--width", "384", "--heads", "8"]
    assert commands[0][commands[0].index("--num_gpus") + 1] == "4"
    settings = json.loads((case.folder(found.out) / "ds_config.json").read_text())
    rates = {"muon_lr": 0.02, "adam_lr": 0.001}
    assert settings["optimizer"]["type"] == "Muon"
    assert settings["optimizer"]["params"].items() >= rates.items()
    assert settings["scheduler"]["params"]["warmup_max_lr"] == [0.02, 0.001]
    with pytest.raises(SystemExit):
        options(tmp_path, "--layouts", "ddp2", "--muon-lr", "0.02")
    assert "--muon-lr: expected layouts of DeepSpeed" in capsys.readouterr().err


def test_a_study_leaves_its_commands(tmp_path: Path) -> None:
    words = ["--layouts", "dp2", "--presets", "--seeds", "3", "4"]
    for _ in range(2):
        loss_study.write_command(options(tmp_path, *words))
    loss_study.write_command(options(tmp_path, *words, "--muon-lr", "0.02"))
    lines = (tmp_path / "out" / loss_study.COMMANDS).read_text().splitlines()
    common = "scripts/benchmarks/loss_study.py --steps 1000"
    assert [line.startswith(common) for line in lines] == [True, True]
    assert "--seeds 3 4 --layouts dp2 --presets --muon-lr 0.02" in lines[1]
    again = lines[1].split()[1:]
    assert options(tmp_path, *again).muon_lr == 0.02 and options(tmp_path, *again).presets == []


def test_blocks_for_all_layouts_or_for_each(tmp_path: Path) -> None:
    file, block = tmp_path / "blocks.json", {"dp": "bf16"}
    file.write_text(json.dumps({"mine": block}))
    found = options(tmp_path, "--blocks", str(file), "--presets")
    assert loss_study.blocks_of(found, "pp2") == {"baseline": None, "mine": block}
    file.write_text(json.dumps({"dp2": {"mine": block}}))
    assert loss_study.blocks_of(found, "dp2") == {"baseline": None, "mine": block}
    assert loss_study.blocks_of(found, "pp2") == {"baseline": None}
    file.write_text(json.dumps({"dp2": {"mine": block}, "other": block}))
    with pytest.raises(SystemExit, match="one level"):
        loss_study.blocks_of(found, "dp2")


def test_settings_keep_the_committed_file(tmp_path: Path) -> None:
    found = options(tmp_path, "--steps", "50", "--divide-batch", "4")
    block = {"dp": "bf16", "ledger": {"sample_every": 3}}
    case = loss_study.Case("dp2", "mine", block, 0)
    settings = loss_study.settings_of(case, found, tmp_path)
    committed = json.loads((loss_study.CONFIGS / "ds_zero1_baseline.json").read_text())
    assert settings["optimizer"] == committed["optimizer"]
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["scheduler"]["params"]["total_num_steps"] == 50
    assert settings["compression"]["ledger"] == {
        "sample_every": 3,
        "jsonl": str(tmp_path / "ledger.jsonl"),
    }
    found.divide_batch = 3
    with pytest.raises(SystemExit, match="divisor of 8"):
        loss_study.settings_of(case, found, tmp_path)


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = recorded(monkeypatch)
    found = options(tmp_path, "--steps", "50")
    case = loss_study.Case("pp2", "mine", {"pp": "bf16"}, 1)
    assert loss_study.train(case, found) is not None
    assert loss_study.train(case, found) is None
    assert len(commands) == 1
    assert commands[0][-2:] == ["--pp", "2"]
    assert "hybridcomp.run" in commands[0]
    found.steps = 60  # another training: repeated
    assert loss_study.train(case, found) is not None


def test_a_failure_shows_the_end_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], output: Path, *_: Any, **__: Any) -> int:
        output.write_text("the reason\n")
        return 3

    monkeypatch.setattr(launch, "run_logged", run)
    case = loss_study.Case("dp2", "baseline", None, 0)
    with pytest.raises(CompareError, match="the reason\ndp2 baseline seed 0: status 3"):
        loss_study.train(case, options(tmp_path))
    assert not (case.folder(tmp_path / "out") / "done.json").exists()


def test_a_missing_package_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_study, "find_spec", lambda name: None)
    monkeypatch.setattr(loss_study, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(CompareError, match="matplotlib"):
        loss_study.study(options(tmp_path))


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loss_study.parse(["--data", str(tmp_path / "none")])
    assert "prepare_data.py writes one" in capsys.readouterr().err
