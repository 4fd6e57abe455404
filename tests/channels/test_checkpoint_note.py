"""The checkpoint's description, for people, for jobs and for ``hybridcomp validate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.channels.checkpoint.checkpoint_note import FILE, PARAMETERS, RESIDUALS
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError

FEEDBACK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}}


def written(folder: Path, *kinds: str, block: object = FEEDBACK) -> Path:
    checkpoint_note.write(folder, CompressionConfig.parse(block), 7, 2, kinds)
    return folder


def test_it_names_what_a_run_without_hybridcomp_would_drop(tmp_path: Path) -> None:
    note = json.loads((written(tmp_path / "tag", RESIDUALS, PARAMETERS) / FILE).read_text())
    assert list(note)[0] == "README"
    assert "`python -m hybridcomp.run " in note["README"]
    assert note["step"] == 7 and note["compression"] == FEEDBACK
    assert set(note["files"]) == {f"{RESIDUALS}_rank_*.pt", f"{PARAMETERS}_rank_*.pt"}
    assert CompressionConfig.parse(note["compression"]).digest() == note["digest"]


def test_without_such_files_it_says_that_nothing_is_needed(tmp_path: Path) -> None:
    note = checkpoint_note.read(written(tmp_path))
    assert note is not None and note["README"] == checkpoint_note.SELF_CONTAINED
    assert checkpoint_note.dropped(tmp_path, None) == []


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (None, "this job has no block: dropped are hybridcomp_residuals_rank_*.pt"),
        ({"dp": "bf16"}, "this job's block has no error feedback under dp"),
        (FEEDBACK, None),
    ],
)
def test_a_job_is_told_what_it_drops(tmp_path: Path, block: object, told: str | None) -> None:
    written(tmp_path, RESIDUALS)
    config = None if block is None else CompressionConfig.parse(block)
    found = checkpoint_note.dropped(tmp_path, config)
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def test_checkpoints_without_a_note_and_with_a_damaged_one(tmp_path: Path) -> None:
    assert checkpoint_note.read(tmp_path) is None and checkpoint_note.dropped(tmp_path, None) == []
    for text in ('{"files": ', "[]", '{"files": 3}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ConfigError, match=FILE):
            checkpoint_note.read(tmp_path)
        assert "WARNING" in checkpoint_note.dropped(tmp_path, None)[0]


def test_folders_and_missing_files(tmp_path: Path) -> None:
    folder = written(tmp_path / "global_step7", RESIDUALS)
    (tmp_path / "latest").write_text("global_step7")
    assert checkpoint_note.folder_of(tmp_path) == folder == checkpoint_note.folder_of(folder)
    output = tmp_path / "trainer"
    for name in ("checkpoint-9", "checkpoint-20", "checkpoint-best"):
        (output / name / "global_step").mkdir(parents=True)
        (output / name / "latest").write_text("global_step")
    assert checkpoint_note.folder_of(output) == output / "checkpoint-20" / "global_step"
    with pytest.raises(ConfigError, match="--checkpoint"):
        checkpoint_note.folder_of(tmp_path / "nowhere")
    note = checkpoint_note.read(folder)
    assert note is not None
    (folder / f"{RESIDUALS}_rank_00001.pt").touch()
    assert checkpoint_note.missing(folder, note) == [f"{RESIDUALS}_rank_00000.pt"]
