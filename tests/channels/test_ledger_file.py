"""An unwritable ledger ends every rank with one line, before the first step."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.channels.accounting import ledger_file
from hybridcomp.channels.accounting.ledger_file import JsonLines
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.session.engine_session import EngineSession
from tests.ranks import RunRanks


def opened(folder: str) -> str:
    """Return a rank's error when a file takes the ledger folder's place; then use another."""
    Path(folder, "file").touch()
    dist.barrier()
    wrong = CompressionConfig.parse({"dp": "bf16", "ledger": {"jsonl": f"{folder}/file/l.jsonl"}})
    with pytest.raises(ConfigError) as caught:
        EngineSession(Channels(wrong), torch.device("cpu")).open_reporter()
    right = CompressionConfig.parse({"dp": "bf16", "ledger": {"jsonl": f"{folder}/new/l.jsonl"}})
    session = EngineSession(Channels(right), torch.device("cpu"))
    session.open_reporter()
    session.close()
    dist.barrier()
    return str(caught.value)


def test_all_ranks_are_told_which_file_of_which_key(on_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, opened, str(tmp_path))
    assert first == second
    assert first.startswith(f"compression.ledger.jsonl: found '{tmp_path}/file/l.jsonl'; rank 0 ")
    assert f"cannot write it (Not a directory: {tmp_path}/file); name a file" in first
    assert (tmp_path / "new" / "l.jsonl").read_text().count('"summary": true') == 1
    assert not (tmp_path / "new" / "l.1.jsonl").exists()


def recorded(folder: str) -> str:
    pytest.importorskip("deepspeed")
    from hybridcomp.patches.ds import record

    os.environ[record.ENVIRONMENT] = folder  # a file, not a folder
    record._recorded = False
    try:
        with pytest.raises(ConfigError) as caught:
            record.attach(SimpleNamespace(optimizer=object()))
    finally:
        del os.environ[record.ENVIRONMENT]
    return str(caught.value)


def test_a_record_of_the_run_likewise(on_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    first, second = on_ranks(2, recorded, str(tmp_path))
    assert first == second
    assert first.startswith("HYBRIDCOMP_RECORD: found ") and "(Is a directory)" in first


def full(folder: str) -> str:
    """Return a rank's error when only writing reveals the problem."""

    class Full(JsonLines):
        def __init__(self, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(ledger_file, "JsonLines", Full)
        ledger_file.make_together(Path(folder, "l.jsonl"), "compression.ledger.jsonl")
    return str(caught.value)


def test_a_disk_that_is_full_is_told_by_its_number(on_ranks: RunRanks, tmp_path: Path) -> None:
    for said in on_ranks(2, full, str(tmp_path)):
        assert "rank 0 cannot write it (ENOSPC: No space left on device)" in said


def test_what_cannot_be_written_is_seen_without_writing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ledger_file.unwritable(tmp_path / "a" / "b" / "l.jsonl") is None
    assert not (tmp_path / "a").exists()
    assert ledger_file.unwritable(tmp_path / "file") is None
    assert ledger_file.unwritable(tmp_path) == "Is a directory"
    found = ledger_file.unwritable(tmp_path / "file" / "l.jsonl")
    assert found == f"Not a directory: {tmp_path}/file"


@pytest.mark.parametrize("content", ["precious", "", None])
def test_a_link_is_set_aside_and_not_followed(tmp_path: Path, content: str | None) -> None:
    other, path = tmp_path / "other", tmp_path / "ledger.jsonl"
    if content is not None:
        other.write_text(content)
    path.symlink_to(other)
    for run in range(2):
        lines = JsonLines(path)
        lines.write({"run": run})
        lines.close()
    assert not path.is_symlink() and path.read_text() == '{"run": 1}\n'
    assert (tmp_path / "ledger.2.jsonl").read_text() == '{"run": 0}\n'
    assert (other.read_text() if other.exists() else None) == content


def test_a_link_to_a_device_is_what_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.symlink_to("/dev/null")
    lines = JsonLines(path)
    lines.write({"run": 0})
    lines.close()
    assert path.is_symlink() and [one.name for one in tmp_path.iterdir()] == ["ledger.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = ledger_file.unwritable(tmp_path / "l.jsonl")
    assert found == f"Permission denied: {tmp_path}"
