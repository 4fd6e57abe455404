"""Remove unused files from a folder: old versions, and leftovers of interrupted runs.

All versions before the oldest full version to be kept are removed. A receiver that is currently
reading keeps its open files. A receiver that finds a manifest or part missing looks again and takes
the newest full version, which always exists.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line, quoted_path
from hybridcomp.log import say
from hybridcomp.publishing.destinations import PARTS, manifests_in, read_manifest_file

_PART = re.compile(r"v(\d{10})\..*?(r\d{5})?\.part(\.unfinished|\.failed)?")
_UNFINISHED = re.compile(r"\.v(\d{10})\.json\.[0-9a-f]{8}")


def remove_old(folder: Path, keep: int) -> int:
    """Keep the newest ``keep`` full versions of ``folder`` and their successors; remove the rest.

    Manifests are removed before their parts, so that no version without parts looks readable;
    leftovers of an earlier call are removed as well. Returns how many versions were removed. Raises
    OSError, and PublishError if a manifest is damaged.
    """
    oldest = _oldest_kept(folder, keep)
    removed = 0
    for version, path in manifests_in(folder).items():
        if version < oldest:
            path.unlink(missing_ok=True)
            removed += 1
    for path in (folder / PARTS).iterdir():
        match = _PART.fullmatch(path.name)
        if match and int(match[1]) < oldest:
            path.unlink(missing_ok=True)
    return removed


def _oldest_kept(folder: Path, keep: int) -> int:
    """Return the version of the ``keep``-th newest full one; 0 if there are fewer."""
    for version, path in reversed(manifests_in(folder).items()):
        keep -= read_manifest_file(path, version).full
        if not keep:
            return version
    return 0


class Leftovers:
    """Files that no version names when a job begins to publish, left by interrupted runs.

    A leftover of version n is removed once this job's version n, or a later one, exists: then no
    run can turn the leftover into a version any more. Files that have changed since the listing
    stay, because somebody is writing them.
    """

    def __init__(self, folder: Path) -> None:
        """List the leftovers of ``folder``. Raises OSError, and PublishError if it cannot be
        read.
        """
        self._seen = {path: _stamp(path) for path in _unnamed(folder)}

    def remove(self, version: int) -> int:
        """Remove the leftovers up to ``version``; return how many. Raises OSError."""
        seen, self._seen, count = self._seen, {}, 0
        for path, stamp in seen.items():
            if _version(path) <= version and stamp is not None and _stamp(path) == stamp:
                path.unlink(missing_ok=True)
                count += 1
        return count


class Cleaning:
    """Remove leftovers and old versions of a folder after each new version, on rank 0."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        """List files left by interrupted runs; ``keep``: as for ``remove_old``."""
        self._folder, self._keep = folder, keep
        self._left: Leftovers | None = None
        try:
            self._left = Leftovers(folder)
        except (OSError, PublishError) as error:
            say(f"publish: nobody looked for leftovers: {one_line(error)}", anywhere=True)

    def after(self, version: int, full: bool) -> None:
        """Remove what the readable ``version`` has made needless.

        Errors are logged, not raised.
        """
        left, self._left = self._left, None
        try:
            count = 0 if left is None else left.remove(version)
            if count:
                where = quoted_path(self._folder)
                text = f"publish: removed {count} file(s) in {where} of runs that were cut off"
                say(text, anywhere=True)
            if full and self._keep is not None:
                remove_old(self._folder, self._keep)
        except (OSError, PublishError) as error:
            say(f"publish: old files were not removed: {one_line(error)}", anywhere=True)


def _unnamed(folder: Path) -> Iterator[Path]:
    """Yield unfinished manifests, and parts that no manifest names.

    It reads a version's manifest only if there is an unfinished part, or two parts of one rank.
    """
    manifests = manifests_in(folder)
    parts: dict[int, dict[str, str | None]] = {}
    if folder.exists():
        yield from (path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name))
    with contextlib.suppress(FileNotFoundError):
        for path in (folder / PARTS).iterdir():
            if match := _PART.fullmatch(path.name):
                parts.setdefault(int(match[1]), {})[path.name] = None if match[3] else match[2]
    for version, ranks in parts.items():
        named: set[str] = set()
        if version in manifests:
            if None not in ranks.values() and len(set(ranks.values())) == len(ranks):
                continue
            try:
                found = read_manifest_file(manifests[version], version)
            except (FileNotFoundError, PublishError):  # it is unknown which parts belong to it
                continue
            named = {part.file for part in found.parts}
        yield from (folder / PARTS / name for name in ranks if name not in named)


def _version(path: Path) -> int:
    return int(path.name.lstrip(".v").partition(".")[0])


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the size and time of a file, which change when it is written; None: it is gone."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
