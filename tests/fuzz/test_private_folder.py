"""Folders with executed files belong to this user and are closed to others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fuzzing.private_folder import private_folder


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stand-in for the shared temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_made_once_and_for_its_user_alone(shared: Path) -> None:
    folder = private_folder("some")
    (folder / "file").touch()
    assert private_folder("some") == folder and folder.parent == shared
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "file").exists()


def test_one_that_others_prepared_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder("open")
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="drwxrwx--- of user"):
        private_folder("open")
    folder.rename(shared / "elsewhere")
    (shared / "elsewhere").chmod(0o700)
    folder.symlink_to(shared / "elsewhere")
    with pytest.raises(PermissionError, match="lrwxrwxrwx"):
        private_folder("open")
    folder.unlink()
    folder.touch(0o600)
    with pytest.raises(PermissionError, match="-rw-------"):
        private_folder("open")


def test_one_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder("other")
    user = folder.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    folder.rename(shared / f"other-{user + 1}")
    with pytest.raises(PermissionError, match=f"of user {user};"):
        private_folder("other")
