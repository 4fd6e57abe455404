"""Files of a rank: whole or not at all, through no link, and no exception on one rank alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "state.json"
    other.write_text("precious")
    (tmp_path / "state.json.part").symlink_to(other)
    saved.write_json(path, {"format": 1})
    assert other.read_text() == "precious"
    assert saved.read_json(path) == {"format": 1} and not path.is_symlink()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "state.json"]


def test_all_of_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(file: int) -> None:
        events.append("sync")
        sync(file)

    def noted_replace(old: Path, new: Path) -> None:
        events.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    saved.write(tmp_path / "a.pt", {"format": 1})
    assert events == ["sync", "name", "sync"]


def test_what_an_ended_save_left_goes_with_the_next(tmp_path: Path) -> None:
    for name in ("a_rank_00001.pt.part", "a_rank_00003.pt.part", "b_rank_00003.pt.part"):
        (tmp_path / name).write_text("half")
    saved.sweep(tmp_path, "a_rank_*.pt", 2)
    left = sorted(found.name for found in tmp_path.iterdir())
    assert left == ["a_rank_00001.pt.part", "b_rank_00003.pt.part"]
    saved.write(tmp_path / "a_rank_00001.pt", {"format": 1})
    assert not (tmp_path / "a_rank_00001.pt.part").exists()


@pytest.mark.parametrize("error", [CheckpointError("it is cut"), KeyError("x"), MemoryError()])
def test_whatever_one_rank_raises_is_told(error: Exception) -> None:
    def work() -> None:
        raise error

    _, problem = saved.attempt(work)
    assert problem and ("it is cut" in problem or type(error).__name__ in problem)
