"""Write a version: what every destination can do, and a folder that object stores can sync.

In a folder every file is immutable: it gets a temporary name, is synced to the disk, and renamed.
Parts are in ``parts/``; the manifest comes last, once all ranks' parts are there, and no second
file can take its name.
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
from hybridcomp.foreign import folder_path, quoted_path
from hybridcomp.job.saved import NEW_FILE, sync_folder
from hybridcomp.log import say
from hybridcomp.publishing.choosing import ReceiverTimes
from hybridcomp.publishing.encoding import Sink
from hybridcomp.publishing.records import DamagedVersion, Manifest, read_manifest
from hybridcomp.publishing.spools import open_file

PARTS = "parts"
_MANIFEST = re.compile(r"v(\d{10})\.json")
#: files by which receivers ask for a full version
ASKS = "ask_full.*.json"
TO = "publish.to"


class Destination(ABC):
    """Takes the parts of all ranks and the manifest of a version.

    Attributes:
        receivers: what the slowest receiver needed for the last version; None: not known.
        feels_link: whether writing takes as long as the link to the receivers.
    """

    receivers: ReceiverTimes | None = None
    feels_link: bool = False

    def latest(self) -> Manifest | None:
        """Return the newest version that is there, on rank 0; None where none can be read back."""
        return None

    @abstractmethod
    def wants_full(self) -> bool:
        """Return whether a receiver needs a full version; called on rank 0 before each version."""

    @abstractmethod
    def begin(self, version: int, rank: int) -> Sink:
        """Begin the part of this rank."""

    @abstractmethod
    def finish(self, problem: str | None) -> str:
        """End the part of this rank, after an error too; returns its file's name."""

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make a version readable, on rank 0, once all parts are there."""

    @abstractmethod
    def abandon(self) -> None:
        """Take back this rank's part of a version that is not committed."""

    def close(self) -> None:  # noqa: B027
        """Free what is held."""


def folder_of(to: str | Path) -> Path:
    """Return the folder of a ``file://`` URL or a path. Raises ConfigError for other URLs."""
    text = os.fspath(to)
    try:
        return folder_path(text)
    except ValueError as error:
        raise ConfigError(TO, text, str(error)) from None


def manifests_in(folder: Path) -> dict[int, Path]:
    """Return the manifests in ``folder`` by version, in order. Raises PublishError."""
    found = {}
    try:
        for path in folder.iterdir():
            if match := _MANIFEST.fullmatch(path.name):
                found[int(match[1])] = path
    except FileNotFoundError:  # before the first version
        return {}
    except OSError as error:
        raise PublishError(
            f"publish: {quoted_path(folder)} cannot be read ({error.strerror}); make it a folder "
            "that can be read, or name another one"
        ) from None
    return dict(sorted(found.items()))


def read_manifest_file(path: Path, version: int) -> Manifest:
    """Read the manifest at ``path``, which is to be of ``version``.

    Raises PublishError, DamagedVersion, and FileNotFoundError where it is gone.
    """
    try:
        with open_file(path) as file:
            text = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PublishError(
            f"version {version}: {quoted_path(path)} cannot be read ({error.strerror}); make it "
            "readable, or copy it again from the sender"
        ) from None
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
    """A folder of this machine, or one that all ranks see."""

    def __init__(self, path: Path, claim: Callable[[Path], str | None] | None = None) -> None:
        """Hold ``path``, which is made with the first version.

        ``claim``: called with it on the first rank, before that; returns who else publishes there,
        or raises an error about it.
        """
        self.path, self._claim = path, claim
        self._token = secrets.token_hex(4)  # parts of a run that was cut off have another one
        self._file: BinaryIO | None = None
        self._version = 0
        self._part = self._unfinished = path

    def latest(self) -> Manifest | None:
        """Return the newest version in the folder. Raises PublishError where it is damaged."""
        for version, path in reversed(manifests_in(self.path).items()):
            return read_manifest_file(path, version)
        return None

    def read(self, version: int) -> Manifest:
        """Return the manifest of ``version``."""
        return read_manifest_file(self._manifest(version), version)

    def _manifest(self, version: int) -> Path:
        return self.path / f"v{version:010d}.json"

    def _new_manifest(self, version: int) -> Path:
        return self.path / f".{self._manifest(version).name}.{self._token}"

    def wants_full(self) -> bool:
        """Return whether a receiver has left a file that asks for a full version."""
        return any(self.path.glob(ASKS))

    def begin(self, version: int, rank: int) -> Sink:
        """Open this rank's part under a temporary name."""
        if self._claim is not None and rank == 0:
            with _as_publish_error(version, self.path):
                if (other := self._claim(self.path)) is not None:
                    raise PublishError(
                        f"version {version}: {quoted_path(self.path)}: another job or island "
                        f"publishes there, {other}; name a folder for each"
                    )
            self._claim = None
        self._version = version
        name = f"v{version:010d}.{self._token}.r{rank:05d}.part"
        self._part = self.path / PARTS / name
        self._unfinished = self._part.with_name(f"{name}.unfinished")
        with _as_publish_error(version, self._unfinished):
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._unfinished.unlink(missing_ok=True)
            self._file = os.fdopen(os.open(self._unfinished, NEW_FILE, 0o666), "wb")
        return _Writer(self._file, version, self._unfinished)

    def finish(self, problem: str | None) -> str:
        """Wait for the disk and give the part its name."""
        file, self._file = self._file, None
        if file is not None:
            with _as_publish_error(self._version, self._unfinished), file:
                file.flush()
                os.fsync(file.fileno())
        if file is not None and problem is None:
            with _as_publish_error(self._version, self._part):
                try:
                    os.replace(self._unfinished, self._part)
                except FileNotFoundError:
                    self._check_alone(self._version)  # another job has removed it
                    raise
                sync_folder(self._part.parent)
        return self._part.name

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest. Raises PublishError where another job or island writes there."""
        target = self._manifest(manifest.version)
        self._check_alone(manifest.version)
        unfinished = self._new_manifest(manifest.version)
        with _as_publish_error(manifest.version, target):
            unfinished.unlink(missing_ok=True)
            with os.fdopen(os.open(unfinished, NEW_FILE, 0o666), "wb") as file:
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
        """Raise PublishError where somebody has written ``version``, or a later one."""
        newest = max(manifests_in(self.path), default=0)
        if newest >= version:
            raise PublishError(
                f"version {version}: {quoted_path(self.path)} has version {newest} already: "
                "another job or island publishes there; end one of them, or name a folder for "
                "each, and start this one again"
            )

    def _answer(self) -> None:
        """Remove what asked for a full version, which is there now."""
        ask = self.path / ASKS
        try:  # the version is readable: an error would have its parts taken back
            for ask in self.path.glob(ASKS):
                ask.unlink(missing_ok=True)
        except OSError as error:
            said = f"publish: {quoted_path(ask)} cannot be removed ({error.strerror})"
            say(f"{said}: all versions are full ones until it is gone", anywhere=True)

    def abandon(self) -> None:
        """Remove this rank's part, and what there is of a manifest."""
        self.finish("abandoned")
        for path in (self._unfinished, self._part, self._new_manifest(self._version)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class _Writer:
    """A file whose errors name the version."""

    def __init__(self, file: BinaryIO, version: int, path: Path) -> None:
        self._file, self._version, self._path = file, version, path

    def write(self, data: memoryview, /) -> None:
        with _as_publish_error(self._version, self._path):
            self._file.write(data)


def _rename_new(unfinished: Path, target: Path) -> None:
    """Give ``unfinished`` the name ``target``, which nobody may have. Raises FileExistsError."""
    try:
        os.link(unfinished, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError(17, "another job has written this version") from None
        os.replace(unfinished, target)
        return
    with contextlib.suppress(OSError):  # the version is readable: from here on nothing may fail
        unfinished.unlink()
