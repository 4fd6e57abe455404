"""Texts of a ``config.json``, a cluster file and a path never run, in any file of a plan."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.config import load_config
from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan.answer import files, start_command
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Engine
from tests.selection import by_day
from tests.test_foreign import armed
from tests.tools.plan.answer.made import CLUSTER, plan
from tests.tools.plan.answer.test_command import ALONE, CONFIG
from tests.tools.plan.answer.test_command import CLUSTER as DESCRIBED

ENGINES: tuple[Engine, ...] = ("deepspeed", "megatron", "neox")
#: stands in for every launcher: writes its arguments, a line for each
LAUNCHER = '#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n'


@pytest.fixture
def launchers(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose launchers only record how they were started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("deepspeed", "torchrun", "python"):
        (folder / name).write_text(LAUNCHER)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "HOST": "node0"}


def names(canary: Path) -> list[str]:
    """Return hostile texts that are valid folder names."""
    return [text for text in armed(canary) if not {"\x00", "\ud800"} & set(text) and text]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_name_runs_nothing_in_the_script(
    engine: Engine, tmp_path: Path, launchers: dict[str, str]
) -> None:
    canary = tmp_path / "canary"
    for text in [*armed(canary), "\x00\ud800"]:
        folder = tmp_path / "plans"
        files.write(plan(model=text, cluster=text, budget=text, engine=engine), CLUSTER, folder)
        start = folder / "start.sh"
        assert len(start.read_text(encoding="utf-8").splitlines()) == 3
        subprocess.run(["bash", "-n", start], check=True)
        done = subprocess.run(
            [start, "--own", "a b"], env=launchers, capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith("--own\na b\n") or engine == "neox"
        assert not canary.exists(), text
        assert Plan.read(folder / "plan.json").model == text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_path_is_one_word(engine: Engine, tmp_path: Path, launchers: dict[str, str]) -> None:
    canary = Path("canary")  # in the working folder: a folder name cannot contain a slash
    for number, text in enumerate(names(canary)):
        if "/" in text:
            continue
        folder = tmp_path / str(number) / text[:60]
        files.write(plan(engine=engine), CLUSTER, folder)
        subprocess.run(["bash", "-n", folder / "start.sh"], check=True)
        done = subprocess.run(
            [folder / "start.sh"], env=launchers, cwd=tmp_path, capture_output=True, check=True
        )
        config = folder.resolve() / start_command.CONFIGS[engine]
        if engine != "megatron":
            assert str(config).encode() in done.stdout
        else:
            assert b"--tensor-model-parallel-size\n1\n" in done.stdout, "of $(cat FILE)"
        assert not (tmp_path / "canary").exists(), text


def test_words_of_the_users_command_stay_words(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    command = ["printf", "%s\\0", *names(canary), "{folder}"]
    files.write(plan(), CLUSTER, tmp_path / "{config}", command=command)
    start = tmp_path / "{config}" / "start.sh"
    done = subprocess.run([start], capture_output=True, check=True)
    said = done.stdout.decode().split("\0")
    assert said[-2] == str(tmp_path / "{config}"), "what was filled in is not filled in again"
    kept = [text for text in names(canary) if "{" not in text]
    assert [one for one in said if one in kept] == kept and not canary.exists()


def test_settings_of_the_users_own_file_stay_settings(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    base: dict[str, Any] = {
        "optimizer": {"params": {"lr": 1e-05, "eps": 1e-08}},
        "notes": armed(tmp_path / "canary"), "yes": "no", "1e-05": "1e5",
    }  # fmt: skip
    for engine, read in (("deepspeed", json.loads), ("neox", yaml.safe_load)):
        files.write(plan(engine=engine), CLUSTER, tmp_path, base)
        found = read((tmp_path / start_command.CONFIGS[engine]).read_text(encoding="utf-8"))
        assert {key: found[key] for key in base} == base


@pytest.mark.parametrize("engine", by_day(ENGINES, ["deepspeed"]))
def test_the_command_plans_a_hostile_config(
    engine: Engine, tmp_path: Path, launchers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A regression test: `_name_or_path` had ended the comment of start.sh."""
    canary = tmp_path / "canary"
    hostile = "".join(armed(canary))
    config = {**CONFIG, "num_hidden_layers": 2, "_name_or_path": hostile}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "cluster.json").write_text(json.dumps({**DESCRIBED, "device": hostile}))
    out = tmp_path / "plans $(touch canary)"
    files_of = [str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.json")]
    batch = ["--samples", "16", "--length", "512", *ALONE]
    assert cli.main(["plan", *files_of, *batch, "--out", str(out), "--engine", engine]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\u202e" not in said
    subprocess.run(["bash", "-n", out / "start.sh"], check=True)
    subprocess.run([out / "start.sh"], env=launchers, cwd=tmp_path, capture_output=True, check=True)
    assert not canary.exists() and not (tmp_path / "canary").exists()
    assert json.loads((out / "plans.json").read_text())
    if engine == "deepspeed":
        assert load_config(out / "ds_config.json") is not None
