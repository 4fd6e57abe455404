"""Bring an engine's weights from one published version to another: whole versions or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp import log
from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line
from hybridcomp.inference.fingerprints import differing, fingerprints
from hybridcomp.job.waits import Notices
from hybridcomp.publishing import AppliedVersion

#: seconds between two looks at a source that has not the version yet
PAUSE_S = 0.2
AGAIN = "update again: the whole of a version is loaded then"


def is_wait(seconds: object) -> bool:
    """Return whether ``seconds`` is a time that a message may ask to wait."""
    return type(seconds) in (int, float) and 0 <= seconds < float("inf")  # type: ignore[operator]


def tell_of_wait(notices: Notices, version: int, wait_s: float) -> None:
    """Say in this process that it waits for ``version``, where ``notices`` are due."""
    if notices.due():
        waited = f"waiting for version {version} for {notices.seconds:.0f} s now"
        log.say(f"{waited}, for {wait_s:g} s at most (wait_s)", anywhere=True)


class Receiver(Protocol):
    """The part of ``hybridcomp.WeightReceiver`` that an engine needs."""

    @property
    def version(self) -> int:
        """Return the version of the mirror; 0 before the first."""

    @property
    def waits_for(self) -> str:
        """Return what the source waits for; "" where it waits for nothing."""

    def update(self, until: int | None = None) -> AppliedVersion | None:
        """Apply the versions that are there, up to ``until``."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors of the mirror."""

    def changed_values(self, name: str) -> tuple[Tensor, Tensor]:
        """Return flat offsets and values that the last update changed."""


@dataclass(frozen=True)
class Patched:
    """Changed values of a parameter, in checkpoint coordinates.

    Attributes:
        name: the parameter, as Hugging Face writes it; ``whole``: all its values, in its shape.
        offsets: flat offsets of the changed values, int64, rising; ``values``: the new values.
    """

    name: str
    whole: Tensor
    offsets: Tensor
    values: Tensor


class Engine(Protocol):
    """Interface by which a follower checks and writes the weights of an engine."""

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError, before anything is written, where the engine cannot take them."""

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write all weights into the engine; ``weights`` are for reading."""

    def prepare_changes(self, patches: list[Patched]) -> Callable[[], object]:
        """Return what writes changed values into the engine, whose others are those of before."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return all tensors of the engine that loading writes, by the engine's own names."""


@dataclass
class Loaded:
    """The version that the engine holds, whole, and fingerprints of its tensors then.

    Attributes:
        version: None where the engine holds none, or may hold a part of one.
        prints: None where none were taken.
        noted: the version of the mirror up to which ``pending`` is complete.
        pending: offsets that the mirror has and the engine has not, by parameter.
    """

    version: int | None = None
    prints: dict[str, int] | None = None
    noted: int = 0
    pending: dict[str, list[Tensor]] = field(default_factory=dict)


class Follower:
    """Loads versions of a receiver into an engine.

    An error in the checks leaves the engine with the version that it held. After an error in
    loading, the engine's own, nothing is known of its weights: ``version`` is None, requests have
    to wait, and the next call loads everything.
    """

    def __init__(
        self,
        receiver: Receiver,
        engine: Engine,
        *,
        wait_s: float = 60.0,
        verify: bool = True,
    ) -> None:
        """Hold receiver and engine; nothing is read before ``follow``.

        Args:
            receiver: the mirror on this host.
            engine: what loads weights.
            wait_s: seconds to wait for a version that is announced and not there yet.
            verify: whether to look, before changed values are written, if the engine's tensors are
                as the last call left them; one pass over its weights.

        Both are attributes, which act from the next call on. ``pause_s`` is how long the last load
        took, in seconds, without what went before.
        """
        self._receiver, self._engine = receiver, engine
        self.wait_s, self.verify = wait_s, verify
        self.pause_s = 0.0
        self._loaded = Loaded()
        self._ready: tuple[list[Patched], Callable[[], object]] | None = None

    @property
    def version(self) -> int | None:
        """Return the version that the engine holds; None where it holds none as a whole."""
        return self._loaded.version

    def follow(self, wanted: int | None = None) -> tuple[str, ...]:
        """Bring the engine to version ``wanted``; None: to the newest one.

        1 look whether the engine is as it was left
        2 receive and check versions, which changes the mirror alone
        3 check whether the engine can take them, and where what changed belongs
        4 load what changed, or everything into an engine of which no version is known
        5 look how the engine's tensors are now

        Returns the names of the parameters that were written. Raises PublishError.
        """
        names = self.load() if self.prepare(wanted) else ()
        self.settle()
        return names

    def prepare(self, wanted: int | None = None) -> bool:
        """Do 1 to 3 of ``follow``, after which the engine is as it was; whether there is 4 to do.

        The engine may answer requests meanwhile. Raises PublishError.
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
        """Take the engine for one that holds no version: the next call loads everything."""
        self._loaded = Loaded()

    def load(self) -> tuple[str, ...]:
        """Do 4 of ``follow``, behind ``prepare``, while the engine answers no request.

        Returns the names of the parameters that were written. Raises PublishError; the engine holds
        no version then.
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
            what = f"{type(error).__name__}: {one_line(error)}"
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
        """Do 5 of ``follow``; the engine may answer requests meanwhile."""
        held = self._loaded
        if held.version is not None and self.verify and held.prints is None:
            held.prints = fingerprints(self._engine.weights())

    def _check_untouched(self) -> None:
        held = self._loaded
        if held.version is None or not self.verify:
            return
        if held.prints is None:  # loaded with ``verify`` off: take prints for the next call
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
        """Update the mirror to ``wanted``, and note what the engine has not yet."""
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
        """Update the mirror, and note what it changed.

        A result that does not begin where the notes end was lost by an error: the engine's version
        is not known then, and everything is loaded.
        """
        applied, held = self._receiver.update(wanted), self._loaded
        if held.version is None:
            return  # everything will be loaded
        if held.noted != (self._receiver.version if applied is None else applied.since):
            self._loaded = Loaded()
        elif applied is not None:
            for name in applied.names:
                offsets, _ = self._receiver.changed_values(name)
                held.pending.setdefault(name, []).append(offsets)
            held.noted = applied.version

    def _patches(self, weights: dict[str, Tensor]) -> list[Patched]:
        """Return what the engine has not yet, with the values of the mirror as it is now."""
        found = []
        for name, rows in sorted(self._loaded.pending.items()):
            offsets = rows[0] if len(rows) == 1 else torch.unique(torch.cat(rows))
            if offsets.numel():
                values = weights[name].reshape(-1)[offsets.to(weights[name].device)]
                found.append(Patched(name, weights[name], offsets, values))
        return found
