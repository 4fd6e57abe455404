"""Switch an engine's weights from one published version to another, always completely."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp import log
from hybridcomp.errors import PublishError
from hybridcomp.escaping import SENTENCE, one_line
from hybridcomp.inference.fingerprints import differing, fingerprints
from hybridcomp.job.waits import Notices
from hybridcomp.publishing import WeightReceiver

#: seconds between two polls of a source that does not have the version yet
PAUSE_S = 0.2
AGAIN = "update again: the whole of a version is loaded then"


def is_wait(seconds: object) -> bool:
    """Return whether ``seconds`` is a valid waiting time: a finite number, at least 0."""
    return type(seconds) in (int, float) and 0 <= seconds < float("inf")  # type: ignore[operator]


def tell_of_wait(notices: Notices, version: int, wait_s: float) -> None:
    """Print that this process waits for ``version``, if ``notices`` are due."""
    if notices.due():
        waited = f"waiting for version {version} for {notices.seconds:.0f} s now"
        log.say(f"{waited}, for {wait_s:g} s at most (wait_s)", anywhere=True)


@dataclass(frozen=True)
class Patched:
    """Changed values of a parameter, in checkpoint coordinates.

    Attributes:
        name, whole: the parameter's Hugging Face name, and all of its values in its shape.
        offsets, values: flat offsets of the changed values, int64, ascending, and the new values.
    """

    name: str
    whole: Tensor
    offsets: Tensor
    values: Tensor


class Engine(Protocol):
    """Interface by which a follower checks and writes the weights of an engine."""

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError, before anything is written, if the engine cannot use the weights."""

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write all weights into the engine; ``weights`` are read-only."""

    def prepare_changes(self, patches: list[Patched]) -> Callable[[], object]:
        """Return a function that writes the changed values into the engine, leaving all others."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return all tensors of the engine that loading may write, with the engine's names."""


@dataclass
class Loaded:
    """The version that the engine holds completely, and fingerprints of its tensors.

    Attributes:
        version: the engine's version; None if it holds none, or possibly only a part of one.
        prints: fingerprints of the engine's tensors; None if they were not computed.
        noted: version of the receiver's mirror up to which ``pending`` is complete.
        pending: by parameter, offsets of values that the mirror has and the engine lacks.
    """

    version: int | None = None
    prints: dict[str, int] | None = None
    noted: int = 0
    pending: dict[str, list[Tensor]] = field(default_factory=dict)


class Follower:
    """Load versions of a receiver into an engine.

    If a check fails, the engine keeps its version. If the engine's own loading fails, its weights
    are unknown: ``version`` is None, requests must wait, and the next call loads everything.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        engine: Engine,
        *,
        wait_s: float = 60.0,
        verify: bool = True,
    ) -> None:
        """Hold receiver and engine; nothing is read before ``follow``.

        ``wait_s``, ``verify``: as for ``ModuleFollower``; both attributes may change between calls.
        With ``verify``, each call reads all of the engine's weights before it writes changes.
        Attribute ``pause_s``: seconds of the last ``load``.
        """
        self._receiver, self._engine = receiver, engine
        self.wait_s, self.verify = wait_s, verify
        self.pause_s = 0.0
        self._loaded = Loaded()
        self._ready: tuple[list[Patched], Callable[[], object]] | None = None

    @property
    def version(self) -> int | None:
        """Return the version that the engine holds; None if it holds none completely."""
        return self._loaded.version

    def follow(self, wanted: int | None = None) -> tuple[str, ...]:
        """Bring the engine to version ``wanted``; None: to the newest one.

        1 check that nobody else has written the engine's weights since the last load
        2 receive and check versions, which changes only the receiver's mirror
        3 check that the engine can use the weights, and find the places of changed values
        4 load changed values, or everything if the engine's version is unknown
        5 compute fingerprints of the engine's tensors

        Returns the names of the parameters that were written. Raises PublishError.
        """
        names = self.load() if self.prepare(wanted) else ()
        self.settle()
        return names

    def prepare(self, wanted: int | None = None) -> bool:
        """Do steps 1 to 3 of ``follow``; return whether step 4 is needed.

        The engine stays unchanged and may answer requests meanwhile. Raises PublishError.
        """
        self._ready = None
        # 1
        self._check_untouched()
        # 2
        self._receive(wanted)
        if self._loaded.version == self._receiver.version:
            return False
        # 3
        weights = dict(self._receiver.tensors())
        self._engine.check(weights.items())
        if self._loaded.version is not None:
            patches = self._patches(weights)
            self._ready = patches, self._engine.prepare_changes(patches)
        return True

    def forget(self) -> None:
        """Assume that the engine holds no version: the next call loads everything."""
        self._loaded = Loaded()

    def load(self) -> tuple[str, ...]:
        """Do step 4 of ``follow``, after ``prepare``, while the engine answers no request.

        Returns the names of the parameters that were written. Raises PublishError, after which the
        engine holds no version.
        """
        begun = time.perf_counter()
        version, ready = self._receiver.version, self._ready
        self._loaded, self._ready = Loaded(), None
        try:
            if ready is None:
                self._engine.load_whole(self._receiver.tensors())
            else:
                ready[1]()
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(error, SENTENCE)}"
            raise PublishError(
                f"version {version}: the engine's loader has failed ({what}): the engine holds no "
                f"version, do not serve from it; {AGAIN}"
            ) from error
        self._loaded = Loaded(version, noted=version)
        self.pause_s = time.perf_counter() - begun
        if ready is None:
            return tuple(name for name, _ in self._receiver.tensors())
        return tuple(one.name for one in ready[0])

    def settle(self) -> None:
        """Do step 5 of ``follow``; the engine may answer requests meanwhile."""
        held = self._loaded
        if held.version is not None and self.verify and held.prints is None:
            held.prints = fingerprints(self._engine.weights())

    def _check_untouched(self) -> None:
        held = self._loaded
        if held.version is None or not self.verify:
            return
        # the last load ran without ``verify``: compute fingerprints for the next call
        if held.prints is None:
            self.settle()
            return
        odd = differing(held.prints, fingerprints(self._engine.weights()))
        if odd:
            self._loaded = Loaded()
            raise PublishError(
                f"version {held.version}: {one_line(odd[0])} of the engine (of {len(odd)} tensors) "
                f"was written by somebody else since it was loaded; {AGAIN}"
            )

    def _receive(self, wanted: int | None) -> None:
        """Update the mirror to ``wanted``, and record what the engine lacks."""
        notices = Notices()
        while True:
            self._update(wanted)
            found = self._receiver.version
            if found and (wanted is None or found >= wanted):
                break
            if notices.seconds >= self.wait_s:
                break
            tell_of_wait(notices, wanted or 1, self.wait_s)
            time.sleep(min(PAUSE_S, max(0.0, self.wait_s - notices.seconds)))
        if not found or wanted not in (None, found):
            waits = self._receiver.waits_for
            raise PublishError(
                f"version {wanted or 1} was not there after {self.wait_s:g} s, the receiver holds "
                f"version {found}{waits and ' and ' + waits}; look whether the sender published it "
                "to this source, or raise wait_s"
            )

    def _update(self, wanted: int | None) -> None:
        """Update the mirror, and add the changed offsets to ``pending``.

        If the update does not start at version ``noted``, an error has interrupted an earlier
        update: the engine's differences are then unknown, and everything is loaded.
        """
        applied, held = self._receiver.update(wanted), self._loaded
        if held.version is None:
            return  # everything will be loaded anyway
        if held.noted != (self._receiver.version if applied is None else applied.since):
            self._loaded = Loaded()
        elif applied is not None:
            for name in applied.names:
                offsets, _ = self._receiver.changed_values(name)
                held.pending.setdefault(name, []).append(offsets)
            held.noted = applied.version

    def _patches(self, weights: dict[str, Tensor]) -> list[Patched]:
        """Return the changes that the engine lacks, with the mirror's current values."""
        found = []
        for name, rows in sorted(self._loaded.pending.items()):
            offsets = rows[0] if len(rows) == 1 else torch.unique(torch.cat(rows))
            if offsets.numel():
                values = weights[name].reshape(-1)[offsets.to(weights[name].device)]
                found.append(Patched(name, weights[name], offsets, values))
        return found
