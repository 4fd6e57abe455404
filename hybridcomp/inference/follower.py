"""Bring an engine's weights from one published version to another: whole versions or none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line
from hybridcomp.inference.fingerprints import differing, fingerprints
from hybridcomp.publishing import AppliedVersion

#: seconds between two looks at a source that has not the version yet
PAUSE_S = 0.2
AGAIN = "update again: the whole of a version is loaded then"


class Receiver(Protocol):
    """The part of ``hybridcomp.WeightReceiver`` that an engine needs."""

    @property
    def version(self) -> int:
        """Return the version of the mirror; 0 before the first."""

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

    def load_changes(self, patches: list[Patched]) -> None:
        """Write changed values into the engine, whose other weights are those of before."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return all tensors of the engine that loading writes, by the engine's own names."""


@dataclass
class Loaded:
    """The version that the engine holds, whole, and fingerprints of its tensors then.

    ``version`` is None where the engine holds none, or may hold a part of one.
    """

    version: int | None = None
    prints: dict[str, int] = field(default_factory=dict)
    #: offsets that the mirror has and the engine has not, by parameter
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
        """
        self._receiver, self._engine = receiver, engine
        self._wait_s, self._verify = wait_s, verify
        self._loaded = Loaded()

    @property
    def version(self) -> int | None:
        """Return the version that the engine holds; None where it holds none as a whole."""
        return self._loaded.version

    def follow(self, wanted: int | None = None) -> tuple[str, ...]:
        """Bring the engine to version ``wanted``; None: to the newest one.

        1 look whether the engine is as it was left
        2 receive and check versions, which changes the mirror alone
        3 check whether the engine can take them
        4 load what changed, or everything into an engine of which no version is known
        5 look how the engine's tensors are now

        Returns the names of the parameters that were written. Raises PublishError.
        """
        # 1
        self._check_untouched()
        # 2
        self._receive(wanted)
        version = self._receiver.version
        if self._loaded.version == version:
            return ()
        weights = dict(self._receiver.tensors())
        # 3
        self._engine.check(weights.items())
        # 4
        patches = self._patches(weights)
        known, self._loaded = self._loaded.version, Loaded()
        if known is None:
            self._engine.load_whole(weights.items())
        elif patches:
            self._engine.load_changes(patches)
        # 5
        prints = fingerprints(self._engine.weights()) if self._verify else {}
        self._loaded = Loaded(version, prints)
        return tuple(weights) if known is None else tuple(one.name for one in patches)

    def _check_untouched(self) -> None:
        held = self._loaded
        if held.version is None or not self._verify:
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
        end = time.monotonic() + self._wait_s
        while True:
            self._update(wanted)
            found = self._receiver.version
            if found and (wanted is None or found >= wanted):
                break
            if time.monotonic() >= end:
                break
            time.sleep(min(PAUSE_S, max(0.0, end - time.monotonic())))
        if not found or wanted not in (None, found):
            raise PublishError(
                f"version {wanted or 1} was not there after {self._wait_s:g} s, the receiver holds "
                f"version {found}; look whether the sender published it to this source, or raise "
                "wait_s"
            )

    def _update(self, wanted: int | None) -> None:
        """Update the mirror, and note what it changed, after an error too: it may have begun."""
        before = self._receiver.version
        try:
            applied = self._receiver.update(wanted)
        except PublishError:
            if self._receiver.version != before:
                self._note(name for name, _ in self._receiver.tensors())
            raise
        self._note(applied.names if applied is not None else ())

    def _note(self, names: Iterable[str]) -> None:
        if self._loaded.version is None:
            return  # everything will be loaded
        for name in names:
            offsets, _ = self._receiver.changed_values(name)
            self._loaded.pending.setdefault(name, []).append(offsets)

    def _patches(self, weights: dict[str, Tensor]) -> list[Patched]:
        """Return what the engine has not yet, with the values of the mirror as it is now."""
        found = []
        for name, rows in sorted(self._loaded.pending.items()):
            offsets = rows[0] if len(rows) == 1 else torch.unique(torch.cat(rows))
            if offsets.numel():
                values = weights[name].reshape(-1)[offsets.to(weights[name].device)]
                found.append(Patched(name, weights[name], offsets, values))
        return found
