"""Define the interface of destinations of versions, and a folder that object stores can sync.

Files in a folder are immutable: each is written under a temporary name, synced to disk, and
renamed. Parts are in ``parts/``; the manifest comes last, once all ranks' parts are there, and no
second file can take its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.escaping import folder_path, quoted_path
from hybridcomp.job.saved import NEW_FILE, sync_folder
from hybridcomp.log import say
from hybridcomp.publishing.choosing import ReceiverTimes
from hybridcomp.publishing.encoding import Sink
from hybridcomp.publishing.part_buffers import open_file
from hybridcomp.publishing.records import MOST_MANIFEST, DamagedVersion, Manifest, read_manifest

PARTS = "parts"
_MANIFEST = re.compile(r"v(\d{10})\.json")
#: name pattern of the files by which receivers request a full version
ASKS = "ask_full.*.json"
TO = "publish.to"
#: suffix of a file that says why a part is missing
FAILED = ".failed"
#: age in seconds beyond which the claim of a version's name is taken to be a killed job's
CLAIM_S = 60.0


class Destination(ABC):
    """Accepts the parts of all ranks and the manifest of a version.

    Attributes:
        receivers: times of the slowest receiver for the last version; None: unknown.
        feels_link: whether writing takes as long as sending to the receivers.
    """

    receivers: ReceiverTimes | None = None
    feels_link: bool = False

    def latest(self) -> Manifest | None:
        """Return the newest available version, on rank 0; None if versions cannot be read back."""
        return None

    @abstractmethod
    def wants_full(self) -> bool:
        """Return whether a receiver needs a full version; called on rank 0 before each version."""

    def reached(self) -> Manifest | None:
        """Return the newest readable version, on rank 0; None unless this object has written it.

        This may be a version for which ``commit`` raised an error.
        """
        return None

    @abstractmethod
    def begin(self, version: int, rank: int) -> Sink:
        """Start this rank's part of a version."""

    @abstractmethod
    def finish(self, problem: str | None) -> str:
        """End this rank's part, also after a ``problem``; return the name of the part's file."""

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make a version readable, on rank 0, once all parts are there."""

    @abstractmethod
    def abandon(self) -> None:
        """Withdraw this rank's part of a version that is not committed."""

    def close(self) -> None:  # noqa: B027
        """Free held resources."""


def folder_of(to: str | Path) -> Path:
    """Return the folder of a ``file://`` URL or a path. Raises ConfigError for other URLs."""
    text = os.fspath(to)
    try:
        return folder_path(text)
    except ValueError as error:
        raise ConfigError(TO, text, str(error)) from None


def part_name(version: int, token: str, rank: int) -> str:
    """Return the name of the file of a rank's part."""
    return f"v{version:010d}.{token}.r{rank:05d}.part"


def manifests_in(folder: Path) -> dict[int, Path]:
    """Return the manifests in ``folder`` by version, in order. Raises PublishError."""
    found = {}
    try:
        for path in folder.iterdir():
            if match := _MANIFEST.fullmatch(path.name):
                found[int(match[1])] = path
    except FileNotFoundError:  # there is no folder before the first version
        return {}
    except OSError as error:
        raise PublishError(
            f"publish: {quoted_path(folder)} cannot be read ({error.strerror}); make it a folder "
            "that can be read, or name another one"
        ) from None
    return dict(sorted(found.items()))


def read_manifest_file(path: Path, version: int) -> Manifest:
    """Read the manifest at ``path``, which must be that of ``version``.

    Raises PublishError, DamagedVersion, and FileNotFoundError if the file is gone.
    """
    try:
        with open_file(path) as file:
            is_longer = os.fstat(file.fileno()).st_size > MOST_MANIFEST
            text = b"" if is_longer else file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PublishError(
            f"version {version}: {quoted_path(path)} cannot be read ({error.strerror}); make it "
            "readable, or copy it again from the sender"
        ) from None
    if is_longer:
        raise DamagedVersion(
            f"version {version}: {quoted_path(path)} is longer than any manifest; copy it again "
            "from the sender"
        )
    found = read_manifest(text, quoted_path(path))
    if found.version != version:
        raise DamagedVersion(
            f"version {version}: {path.name} holds version {found.version}, a replay under another "
            "name; copy the folder again from the sender"
        )
    return found


@contextlib.contextmanager
def _as_publish_error(version: int, path: Path) -> Iterator[None]:
    """Turn an OSError into one line that names version and file."""
    try:
        yield
    except OSError as error:
        raise PublishError(
            f"version {version}: {quoted_path(path)} cannot be written ({error.strerror}); make "
            "room or name another folder; the next version is a full one"
        ) from None


class Folder(Destination):
    """A folder on this machine, or one that all ranks can access."""

    def __init__(self, path: Path, claim: Callable[[Path], str | None] | None = None) -> None:
        """Hold ``path``, which is created with the first version.

        ``claim``: called with ``path`` on the first rank before the first version; returns who else
        publishes there, or raises.
        """
        self.path, self._claim = path, claim
        # parts of an interrupted run or of a failed version have other tokens
        self._tokens = [secrets.token_hex(4)]
        self._file: BinaryIO | None = None
        self._version = 0
        self._part = self._unfinished = path
        self._asks: list[Path] = []  # requests that existed before this version
        #: version, part and unfinished manifest of failed versions, which may have left files
        self._aside: list[tuple[int, Path, Path]] = []

    def latest(self) -> Manifest | None:
        """Return the newest version in the folder. Raises PublishError if it is damaged."""
        for version, path in reversed(manifests_in(self.path).items()):
            return read_manifest_file(path, version)
        return None

    def read(self, version: int) -> Manifest:
        """Return the manifest of ``version``."""
        return read_manifest_file(self._manifest(version), version)

    def _manifest(self, version: int) -> Path:
        return self.path / f"v{version:010d}.json"

    def _new_manifest(self, version: int) -> Path:
        return self.path / f".{self._manifest(version).name}.{self.token}"

    def wants_full(self) -> bool:
        """Return whether a receiver has left a request for a full version."""
        self._asks = list(self.path.glob(ASKS))
        return bool(self._asks)

    def reached(self) -> Manifest | None:
        """Return the newest version in the folder if this object wrote it."""
        newest = self.latest()
        names = [] if newest is None else [part.file for part in newest.parts]
        is_own = any(f".{token}." in name for token in self._tokens for name in names)
        return newest if is_own else None

    @property
    def token(self) -> str:
        """Return the token in the name of this rank's next part; it changes after a failure."""
        return self._tokens[-1]

    def claim(self, version: int, rank: int) -> None:
        """Name this rank's part of ``version``; with the first version claim the folder, on rank
        0.
        """
        # set first, so that an error withdraws files of this version
        self._version = version
        name = part_name(version, self.token, rank)
        self._part = self.path / PARTS / name
        self._unfinished = self._part.with_name(f"{name}.unfinished")
        if self._claim is not None and rank == 0:
            with _as_publish_error(version, self.path):
                if (other := self._claim(self.path)) is not None:
                    raise PublishError(
                        f"version {version}: {quoted_path(self.path)}: another job or island "
                        f"publishes there, {other}; name a folder for each"
                    )
            self._claim = None

    def begin(self, version: int, rank: int) -> Sink:
        """Open this rank's part under a temporary name."""
        self.claim(version, rank)
        with _as_publish_error(version, self._unfinished):
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_new(self._unfinished)
        return _Writer(self._file, version, self._unfinished)

    def finish(self, problem: str | None) -> str:
        """Sync the part to disk and give it its name."""
        file, self._file = self._file, None
        if file is not None:
            with _as_publish_error(self._version, self._unfinished), file:
                file.flush()
                os.fsync(file.fileno())
                own = os.fstat(file.fileno())
        if file is not None and problem is None:
            with _as_publish_error(self._version, self._part):
                try:
                    os.replace(self._unfinished, self._part)
                except OSError as error:
                    if not _is_at(self._part, own):
                        if isinstance(error, FileNotFoundError):
                            self._check_alone(self._version)  # another job has removed the part
                        raise
                sync_folder(self._part.parent)
        return self._part.name

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest. Raises PublishError if another job or island writes there."""
        target = self._manifest(manifest.version)
        self._check_alone(manifest.version)
        unfinished = self._new_manifest(manifest.version)
        with _as_publish_error(manifest.version, target):
            with _open_new(unfinished) as file:
                file.write(manifest.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                _rename_new(unfinished, target)
            except FileExistsError:
                self._check_alone(manifest.version)
                raise
            sync_folder(self.path)
        if manifest.full:
            self._answer()

    def _check_alone(self, version: int) -> None:
        """Raise PublishError if another writer has written ``version`` or a later one."""
        newest = max(manifests_in(self.path), default=0)
        if newest >= version:
            raise PublishError(
                f"version {version}: {quoted_path(self.path)} has version {newest} already: "
                "another job or island publishes there; end one of them, or name a folder for "
                "each, and start this one again"
            )

    def _answer(self) -> None:
        """Remove the requests for a full version that existed before this version was begun.

        Later requests may be caused by this version; the next version answers them.
        """
        ask = self.path / ASKS
        try:  # the version is readable: an error here would withdraw its parts
            for ask in self._asks:
                ask.unlink(missing_ok=True)
        except OSError as error:
            said = f"publish: {quoted_path(ask)} cannot be removed ({error.strerror})"
            say(f"{said}: all versions are full ones until it is gone", anywhere=True)

    def fail(self, problem: str) -> None:
        """Leave a file that tells rank 0 why this rank's part is missing, if possible."""
        with contextlib.suppress(OSError):
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._part.with_name(f"{self._part.name}{FAILED}").write_text(problem)

    def abandon(self) -> None:
        """Remove this rank's part, and the manifest if its writing was begun and not completed.

        A part that a readable manifest names stays, whatever error occurred.
        """
        self.put_aside()
        self.remove_aside()

    def put_aside(self) -> None:
        """End this rank's part of a failed version; the next part gets another name.

        So a part that could not be removed is not mistaken for the part of the next attempt.
        """
        with contextlib.suppress(PublishError, OSError):
            self.finish("abandoned")
        if self._version:
            self._aside.append((self._version, self._part, self._new_manifest(self._version)))
        self._tokens.append(secrets.token_hex(4))

    def remove_aside(self) -> None:
        """Remove the files of failed versions, unless a manifest names them."""
        aside, self._aside = self._aside, []
        for version, part, manifest in aside:
            files = [part.with_name(f"{part.name}{end}") for end in (".unfinished", FAILED)]
            kept = [] if self._is_named(version, part) else [part]
            for path in (*files, manifest, *kept):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _is_named(self, version: int, part: Path) -> bool:
        """Return whether the version's manifest names this rank's part, or may name it."""
        try:
            return any(one.file == part.name for one in self.read(version).parts)
        except FileNotFoundError:
            return False
        except PublishError:
            return True


class _Writer:
    """A file whose errors name the version."""

    def __init__(self, file: BinaryIO, version: int, path: Path) -> None:
        self._file, self._version, self._path = file, version, path

    def write(self, data: memoryview, /) -> None:
        with _as_publish_error(self._version, self._path):
            self._file.write(data)


def _open_new(path: Path) -> BinaryIO:
    """Open a new file for writing; replace a file that this object left unfinished."""
    path.unlink(missing_ok=True)
    try:
        number = os.open(path, NEW_FILE, 0o666)
    except FileExistsError:  # an earlier call of this object created it; its answer was lost
        path.unlink()
        number = os.open(path, NEW_FILE, 0o666)
    return os.fdopen(number, "wb")


def _is_at(path: Path, own: os.stat_result) -> bool:
    """Return whether ``path`` is the file ``own``, for calls that took effect despite an error.

    If the answer to a link or rename is lost, a network file system repeats the request, which then
    fails because the first request has succeeded.
    """
    with contextlib.suppress(OSError):
        return own.st_ino != 0 and os.path.samestat(path.stat(), own)
    return False


def _rename_new(unfinished: Path, target: Path) -> None:
    """Rename ``unfinished`` to ``target``. Raises FileExistsError if that name is taken."""
    own = unfinished.stat()
    try:
        os.link(unfinished, target)
    except OSError as error:
        if not _is_at(target, own):
            if isinstance(error, FileExistsError):
                raise
            _replace_new(unfinished, target)  # a file system without hard links
            return
    with contextlib.suppress(OSError):  # the version is readable: from here on nothing may fail
        unfinished.unlink()


def _replace_new(unfinished: Path, target: Path) -> None:
    """Rename like ``_rename_new``, but without hard links: claim the name, check, then replace.

    Of two concurrent jobs, one gets the claim. A claim left by a killed job is taken over once it
    is older than ``CLAIM_S`` by the file system's clock.
    """
    own, claim = unfinished.stat(), target.with_suffix(".claim")
    with contextlib.suppress(FileNotFoundError):
        if own.st_mtime - claim.stat().st_mtime > CLAIM_S:
            claim.unlink()
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        raise FileExistsError(17, "another job writes this version at this moment") from None
    try:
        if target.exists():
            raise FileExistsError(17, "another job has written this version")
        try:
            os.replace(unfinished, target)
        except OSError:
            if not _is_at(target, own):
                raise
    finally:
        with contextlib.suppress(OSError):  # a claim that stays is taken over later
            claim.unlink()
