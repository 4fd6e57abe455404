"""Files of a rank beside a checkpoint: written whole or not at all, checked before they are used.

A damaged file is an error on every rank, with the rank and the file: a rank that raised alone would
leave the others waiting in the next collective. Nothing of the engine is touched before all files
are known to be good.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridcomp.agreement import tell
from hybridcomp.errors import CheckpointError

T = TypeVar("T")
FORMAT = 1
#: problems of ranks that one message shows
SHOWN = 4


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` with torch; what was there before stays until all of it is on the disk.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    _replace(path, lambda part: torch.save(dict(state), part))


def write_json(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` as JSON, as ``write`` does."""
    text = json.dumps(dict(state)) + "\n"
    _replace(path, lambda part: part.write_text(text, encoding="utf-8"))


def filling(path: Path, fill: Callable[[], object]) -> None:
    """Call ``fill``, which writes ``path``. Raises CheckpointError as ``write`` does."""
    try:
        fill()
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written ({_first_line(error)}); this checkpoint is not complete: "
        "make room and save again, or resume from the one before"
    )


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fill(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise _unwritten(path, error) from error


def read(path: Path) -> dict[str, Any]:
    """What ``write`` wrote, every record of it compared with its checksum.

    Raises:
        CheckpointError: the file is damaged, of another format, or no file of ours.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            bad = archive.testzip()
        stored = {} if bad else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes zipfile and pickle raise anything
        raise damaged(path, f"it cannot be read ({_first_line(error)})") from error
    if bad:
        raise damaged(path, f"the checksum of {bad} is wrong")
    return _of_this_format(path, stored)


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote. Raises CheckpointError."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, f"it cannot be read ({_first_line(error)})") from error
    return _of_this_format(path, stored)


def _of_this_format(path: Path, stored: object) -> dict[str, Any]:
    found = stored.get("format") if isinstance(stored, dict) else type(stored).__name__
    if not isinstance(stored, dict) or found != FORMAT:
        raise damaged(path, f"expected format {FORMAT}, found {found!r}")
    return stored


def expect(path: Path, stored: Mapping[str, Any], key: str, right: Callable[[Any], bool]) -> None:
    """Raise CheckpointError unless ``stored[key]`` is there and ``right``."""
    if key not in stored:
        raise damaged(path, f"it has no {key!r}")
    if not right(stored[key]):
        found = repr(stored[key])
        raise damaged(path, f"{key!r} cannot be {found if len(found) < 60 else found[:57] + '...'}")


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number from 0 up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_scale(value: Any) -> bool:
    """Whether ``value`` may be a loss scale."""
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def is_stretch(value: Any) -> bool:
    """Whether ``value`` is an offset and the fp32 values from there on."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not is_count(value[0]):
        return False
    values = value[1]
    return isinstance(values, Tensor) and values.dtype == torch.float32 and values.dim() == 1


def damaged(path: Path, what: str) -> CheckpointError:
    """The error about a file that is not what was written."""
    return CheckpointError(f"{path} is damaged or of another version of hybridcomp: {what}")


def attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What ``work`` returns and None, or None and the text of its CheckpointError."""
    try:
        return work(), None
    except CheckpointError as error:
        return None, str(error)


def all_well(problem: str | None, what: str, todo: str = "") -> None:
    """Return when no rank has a ``problem``; every rank calls it.

    Raises:
        CheckpointError: on every rank, with the ranks that have one and what it is.
    """
    said = [rank["problem"] for rank in tell({"problem": problem}, what=what)]
    bad = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    if not bad:
        return
    more = f"; and {len(bad) - SHOWN} more ranks" if len(bad) > SHOWN else ""
    raise CheckpointError(f"{what}: {'; '.join(bad[:SHOWN])}{more}{todo and '. ' + todo}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
