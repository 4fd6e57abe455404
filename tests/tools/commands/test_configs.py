"""``hybridcomp configs``: lists and copies the examples of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridcomp.config import load_config
from hybridcomp.tools.commands import configs as examples
from hybridcomp.tools.commands.cli import main
from tests.paths import CONFIGS


def test_each_configuration_is_listed_with_what_it_is_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["configs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = [*CONFIGS.glob("ds_*.json"), *CONFIGS.glob("neox/*.yml")]
    assert sorted(listed) == sorted(str(file.relative_to(CONFIGS)) for file in files)
    page = (CONFIGS / "README.md").read_text().replace("`", "")
    for name in examples.names():
        assert f"| {name} | {listed[name]} |" in page, name
    assert listed["ds_zero1_lossless.json"] == (
        "ZeRO 1, lossless mpc everywhere (preset naive-mpc)"
    )
    order = list(listed)
    assert order[0].startswith("ds_") and order[-1].startswith("neox/")
    row = order.index("ds_zero1_nodes.json")  # "the same between nodes ..."
    assert order[row - 1] == "ds_zero1_recommended.json", "each is the same as the one above it"


def test_one_that_the_page_does_not_know_is_listed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("| file | what it is for |\n|---|---|\n| `z.json` | z |\n")
    for name in ("a.json", "z.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    assert main(["configs"]) == 0
    assert capsys.readouterr().out.splitlines() == ["z.json  z", "a.json"]


def test_copies_are_the_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "mine"
    assert main(["configs", "ds_zero1_recommended", "neox/20B.yml", "--to", str(to)]) == 0
    copied = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert copied == [to / "ds_zero1_recommended.json", to / "20B.yml"]
    assert load_config(copied[0]) is not None
    assert copied[1].read_bytes() == (CONFIGS / "neox/20B.yml").read_bytes()
    assert main(["configs", "ds_zero1_recommended", "--to", str(to)]) == 0, "the same file again"


def test_nothing_of_the_users_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "20B.yml").write_text("mine")
    chosen = ["ds_zero1_recommended", "neox/20B"]
    assert main(["configs", *chosen, "--to", str(tmp_path)]) == 2
    assert "another file of that name is there" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["20B.yml"]
    assert (tmp_path / "20B.yml").read_text() == "mine"


def test_a_name_that_is_none_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "ds_zero1_recomended"]) == 2
    assert "did you mean 'ds_zero1_recommended'?" in capsys.readouterr().err
