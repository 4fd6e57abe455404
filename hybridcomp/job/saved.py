"""Write a rank's files beside a checkpoint atomically, and check them before use.

A damaged file raises an error on every rank, which names the file and its rank: if only one rank
raised, the others would wait for it in the next collective. The engine is changed only after all
files have been checked.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from hybridcomp.errors import CheckpointError, PublishError
from hybridcomp.job.agreement import tell

T = TypeVar("T")
FORMAT = 1
#: flags that create a new file and follow no link
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
#: flags of zip records that torch writes: sizes follow the data, names are UTF-8
_FLAGS = 0x808
#: attributes of zip records that torch leaves at 0
_ZEROS = ("external_attr", "internal_attr", "compress_type", "volume")
#: most ranks whose problems an error lists
SHOWN = 4


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` with torch; an older file stays until the new one is fully on disk.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    _replace(path, lambda file: torch.save(dict(state), file))


def write_json(path: Path, state: Mapping[str, Any], indent: int | None = None) -> None:
    """Write ``state`` as JSON, in the same way as ``write``."""
    text = json.dumps(dict(state), indent=indent) + "\n"
    _replace(path, lambda file: file.write(text.encode()))


def sweep(folder: Path, pattern: str, world_size: int) -> None:
    """Remove unfinished files of ranks from ``world_size`` up, which no rank will write again.

    An interrupted save leaves such files; those of lower ranks are overwritten. ``pattern``: the
    file names of the complete files, with ``*`` for the rank. Raises CheckpointError.
    """
    start, _, end = pattern.partition("*")
    for part in folder.glob(f"{pattern}.part"):
        rank = part.name.removeprefix(start).removesuffix(f"{end}.part")
        if rank.isdigit() and int(rank) >= world_size:
            try:
                part.unlink(missing_ok=True)
            except OSError as error:
                raise unwritten(part, error) from error


def unwritten(path: Path, error: BaseException) -> CheckpointError:
    """Return the error for a checkpoint file that could not be written."""
    return CheckpointError(
        f"{path} cannot be written ({_first_line(error)}); this checkpoint is not complete: "
        "make room and save again, or resume from the one before"
    )


def remove(path: Path) -> None:
    """Remove ``path`` if it exists: at the end of ``files_together``, or now outside of it."""
    gone = NewFile(None, path)
    if waiting:
        waiting[0].append(gone)
    else:
        gone.rename()


class NewFile:
    """A complete file ``part`` that will replace ``path``; if None, ``path`` will be removed."""

    def __init__(self, part: Path | None, path: Path) -> None:
        self.part, self.path = part, path
        self.is_named = False

    def rename(self) -> None:
        """Give the file its name. Raises OSError."""
        self.is_named = True
        if self.part is None:
            self.path.unlink(missing_ok=True)
            return
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)


#: files to be renamed once the files of all ranks are complete (``saved_together``)
waiting: list[list[NewFile]] = []


def _replace(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Fill a new file beside ``path``, sync it to disk, and replace ``path`` by it.

    It never writes through a symbolic link at that path.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, NEW_FILE, 0o666), "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        new = NewFile(part, path)
        if waiting:
            waiting[0].append(new)
        else:
            new.rename()
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise unwritten(path, error) from error


def sync_folder(folder: Path) -> None:
    """Sync the folder's entries to disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """Read a file of ``write``, with every record checked against its checksum.

    Raises:
        CheckpointError: the file is damaged, of another format, or no file of ours.
    """
    return _of_this_format(path, _checked(path, path))


def unpack(packed: object, name: str) -> dict[str, Any]:
    """Unpack the bytes ``packed`` of ``torch.save``, entry ``name``; raises like ``read``."""
    if not isinstance(packed, bytes):
        raise damaged(name, f"expected bytes, found {type(packed).__name__}")
    return _of_this_format(name, _checked(io.BytesIO(packed), name))


def _checked(file: Any, name: Path | str) -> object:
    try:
        with zipfile.ZipFile(file) as archive:  # torch.load does not verify the checksums
            bad = _odd_header(archive) or archive.testzip()
        if isinstance(file, io.BytesIO):
            file.seek(0)
        stored = {} if bad else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # on a damaged file zipfile and pickle may raise anything
        raise damaged(name, f"it cannot be read ({_first_line(error)})") from error
    if bad:
        raise damaged(name, f"the header or the checksum of {bad} is wrong")
    return stored


def _odd_header(archive: zipfile.ZipFile) -> str | None:
    """Return the name of the first record with a header that torch never writes, or None.

    Python and torch have separate zip readers. If a header is ambiguous, the bytes that Python
    checks may not be those that torch reads: torch leaves a "folder" record's memory uninitialized.
    """
    seen: set[str] = set()
    for record in archive.infolist():
        marked = any(getattr(record, name) for name in _ZEROS) or record.flag_bits & ~_FLAGS
        odd = record.comment or record.is_dir() or record.compress_size != record.file_size
        if marked or odd or record.filename in seen:
            return record.filename
        seen.add(record.filename)
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of ``write_json``. Raises CheckpointError."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, f"it cannot be read ({_first_line(error)})") from error
    return _of_this_format(path, stored)


def _of_this_format(path: Path | str, stored: object) -> dict[str, Any]:
    written = stored.get("format") if isinstance(stored, dict) else type(stored).__name__
    if not isinstance(stored, dict) or written != FORMAT:
        raise damaged(path, f"expected format {FORMAT}, found {written!r}")
    return stored


def expect(
    path: Path | str, stored: Mapping[str, Any], key: str, right: Callable[[Any], bool]
) -> None:
    """Raise CheckpointError unless ``stored[key]`` exists and ``right`` accepts it."""
    if key not in stored:
        raise damaged(path, f"it has no {key!r}")
    if not right(stored[key]):
        value = repr(stored[key])
        raise damaged(path, f"{key!r} cannot be {value if len(value) < 60 else value[:57] + '...'}")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_scale(value: Any) -> bool:
    """Return whether ``value`` may be a loss scale."""
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def are_factors(value: Any) -> bool:
    """Return whether ``value`` is a state of ``Factors.state_dict`` with finite values."""
    return isinstance(value, dict) and all(
        isinstance(factor, Tensor) and bool(factor.isfinite().all()) for factor in value.values()
    )


def damaged(path: Path | str, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or of another version of hybridcomp: {what}")


def attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return ``(result of work, None)``, or ``(None, its error in words)``.

    Catches every error: a rank that raised alone would leave the others in ``all_well``.
    """
    try:
        return work(), None
    # these errors name the file and say what to do
    except (CheckpointError, PublishError) as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {_first_line(error)}"


def all_well(problem: str | None, what: str, todo: str = "") -> None:
    """Return if no rank has a ``problem``; every rank calls it.

    Raises:
        CheckpointError: on every rank, naming the ranks with a problem, and the problem.
    """
    said = [rank["problem"] for rank in tell({"problem": problem}, what=what)]
    bad = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    if not bad:
        return
    more = f"; and {len(bad) - SHOWN} more ranks" if len(bad) > SHOWN else ""
    raise CheckpointError.naming_rank(
        f"{what}: {'; '.join(bad[:SHOWN])}{more}{todo and '. ' + todo}"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
