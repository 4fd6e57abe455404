"""A rank's files: written whole or not at all, never through links or with one-rank errors."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved
from hybridcomp.job.saved_together import files_together
from tests.selection import by_day


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "state.json"
    other.write_text("precious")
    (tmp_path / "state.json.part").symlink_to(other)
    saved.write_json(path, {"format": 1})
    assert other.read_text() == "precious"
    assert saved.read_json(path) == {"format": 1} and not path.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "state.json"]


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
    for name in ("a_rank_00001.pt.part", "a_rank_00002.pt.part", "b_rank_00003.pt.part"):
        (tmp_path / name).write_text("half")
    saved.sweep(tmp_path, "a_rank_*.pt", 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a_rank_00001.pt.part", "b_rank_00003.pt.part"]
    saved.write(tmp_path / "a_rank_00001.pt", {"format": 1})
    assert not (tmp_path / "a_rank_00001.pt.part").exists()


def test_files_are_as_before_if_one_cannot_get_its_name(tmp_path: Path) -> None:
    old, new, folder = (tmp_path / name for name in ("old", "new", "folder"))
    before, after = {"format": 1, "step": 1}, {"format": 1, "step": 2}
    saved.write_json(old, before)
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError), files_together("save"):
        with files_together("a part of it"):
            saved.write_json(old, after)
        saved.write_json(new, after)
        assert saved.read_json(old) == before and not new.exists(), "no file has its name yet"
        saved.write_json(folder, after)
    assert saved.read_json(old) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "old"]


@pytest.mark.parametrize("error", [CheckpointError("it is cut"), KeyError("x"), MemoryError()])
def test_whatever_one_rank_raises_is_told(error: Exception) -> None:
    def work() -> None:
        raise error

    _, problem = saved.attempt(work)
    assert problem and ("it is cut" in problem or type(error).__name__ in problem)


def test_loss_scales_are_positive_and_finite() -> None:
    values = [1, 0.5, 0, -1.0, float("inf"), float("nan"), "1"]
    assert [value for value in values if saved.is_scale(value)] == [1, 0.5]


def test_a_second_record_of_a_name_is_damage(tmp_path: Path) -> None:
    """Python's reader would check the last record of a name, torch's may read another."""
    saved.write(tmp_path / "a.pt", {"format": 1})
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(archive.namelist()[0], b"other")
        archive.infolist()[-1].external_attr = 0  # as torch writes it
    with pytest.raises(CheckpointError, match="the header or the checksum of"):
        saved.read(tmp_path / "a.pt")


def headers_of(data: bytes) -> list[int]:
    """Return the positions of bytes outside records."""
    inside: set[int] = set()
    for record in zipfile.ZipFile(io.BytesIO(data)).infolist():
        lengths = struct.unpack_from("<HH", data, record.header_offset + 26)
        start = record.header_offset + 30 + sum(lengths)
        inside.update(range(start, start + record.file_size))
    return [place for place in range(len(data)) if place not in inside]


@pytest.mark.parametrize("every", by_day([5, 1], [5]))
def test_no_flipped_bit_of_a_header_gives_other_values(every: int) -> None:
    file, values = io.BytesIO(), torch.arange(40) + 0.42
    torch.save({"format": 1, "values": values}, file)
    data = file.getvalue()
    directory = data.index(b"PK\x01\x02")
    places = headers_of(data)
    refused = 0
    for place in (at for at in places if at >= directory or at % every == 0):
        for bit in range(8) if place % every == 0 or every == 1 else (4,):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                state = saved.unpack(bytes(damaged), "state")
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error)
            else:
                assert torch.equal(state["values"], values), (place, bit)
    assert refused > 100
