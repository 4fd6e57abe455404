"""Errors of hybridcomp.

HybridcompError
 +- ConfigError      the "compression" block, or the configuration around it, cannot act as written
 +- CodecError       a codec was given a tensor, a payload or a device that it cannot handle
 +- SeamError        an upstream symbol is missing, changed, or outside the supported versions
 +- AgreementError   ranks of one job disagree on block or versions
 +- CheckpointError  a file of ours in a checkpoint is damaged, missing or could not be written
 +- PeerError        a message to or from another rank failed; the error names the missing ranks
 +- StateFileError   a file of optimizer states is damaged, missing or cannot be written
 +- PublishError     a version of published weights cannot be written, read or applied
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

#: command that installs hybridcomp itself
CLONE = "pip install -e . in the clone of hybridcomp"


def install_hint(extra: str = "") -> str:
    """Return the command that installs hybridcomp (from its clone), or an extra's packages.

    The command names an extra's packages, since ``pip install`` of the extra rebuilds hybridcomp.
    """
    wanted = _packages(extra) if extra else []
    return f"pip install {shlex.join(wanted)}" if wanted else CLONE


def installed(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _packages(extra: str) -> list[str]:
    """Return the packages of an extra, with their versions; empty if unknown."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        listed = [Requirement(text) for text in metadata.requires("hybridcomp") or ()]
    except metadata.PackageNotFoundError:
        return []
    packages: list[str] = []
    for needed in listed:
        if needed.marker is None or not needed.marker.evaluate({"extra": extra}):
            continue
        extras = sorted(needed.extras) if needed.name == "hybridcomp" else []
        inner = [text for name in extras for text in _packages(name)]
        packages += inner or [f"{needed.name}{needed.specifier}"]
    return packages


class HybridcompError(Exception):
    """Base class of every error that hybridcomp raises on purpose.

    Attributes:
        names_rank: whether the message names the rank that failed, whichever rank raises it.
    """

    names_rank = False

    @classmethod
    def naming_rank(cls, text: str) -> Self:
        """Return an error of this class whose ``text`` names the rank that failed."""
        error = cls(text)
        error.names_rank = True
        return error


class ConfigError(HybridcompError, ValueError):
    """A setting is unknown, impossible, or cannot take effect.

    Args:
        key: dotted path of the setting, for example ``compression.dp.bits``.
        found: the value found.
        todo: the expected value and what to do about it.
    """

    def __init__(self, key: str, found: object, todo: str) -> None:
        self.key, self.found, self.todo = key, found, todo
        # a part of the key may come from a user's file, and a line feed in it would break the line
        shown = key if key.isprintable() else repr(key)[1:-1]
        super().__init__(f"{shown}: found {found!r}; {todo}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.found, self.todo)


class CodecError(HybridcompError, ValueError):
    """A codec met a dtype, device, length or payload that it cannot encode or decode."""


class SeamError(HybridcompError, RuntimeError):
    """An upstream symbol cannot be patched (or unpatched) as declared."""


class AgreementError(HybridcompError, RuntimeError):
    """The ranks of a job do not run the same block or the same versions."""


class CheckpointError(HybridcompError, RuntimeError):
    """A file of hybridcomp in a checkpoint's folder is damaged or cannot be written."""


class StateFileError(HybridcompError, RuntimeError):
    """A file of optimizer states on NVMe is damaged, missing or cannot be written.

    The message names the file and the fault; nothing of the file was used.
    """


class PeerError(HybridcompError, RuntimeError):
    """Another rank of the job ended, was stopped or is silent; the message names it."""


class PublishError(HybridcompError, RuntimeError):
    """A version of published weights cannot be written, or does not fit the receiver's weights.

    The message names the version, the tensor or file, and what to do.
    """
