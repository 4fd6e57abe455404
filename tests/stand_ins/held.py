"""Count the bytes of buffers that messages hold at once."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hybridcomp.collectives import owner_reduction
from hybridcomp.collectives.async_p2p import Posting
from hybridcomp.collectives.wire.encoding import POOL


class Held:
    """Counts the bytes that messages hold while entered, ``now`` and at ``most``.

    Pool buffers count until they are returned; buffers of posted messages and owners' sums until
    they are collected. The pool keeps no buffer and allocates exactly the requested length.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._patches = ExitStack()
        self._room, self._flat = Posting._room, owner_reduction._flat

    def __enter__(self) -> Held:
        enter = self._patches.enter_context
        enter(mock.patch.object(POOL, "take", self.take))
        enter(mock.patch.object(POOL, "give", self.give))
        held = self

        def room(posting: Posting, numel: int, like: Tensor) -> Tensor:
            return held.kept(held._room(posting, numel, like))

        def flat(*arguments: Any) -> Any:
            steps, sums = held._flat(*arguments)
            whole = sums[0]._base if sums else None
            if whole is not None:
                held.kept(whole)
            return steps, sums

        enter(mock.patch.object(Posting, "_room", room))
        enter(mock.patch.object(owner_reduction, "_flat", flat))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def kept(self, made: Tensor) -> Tensor:
        """Count ``made`` until it is collected."""
        self.add(made.nbytes)
        weakref.finalize(made, self.add, -made.nbytes)
        return made

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        self.add(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, *buffers: Tensor | None) -> None:
        self.add(-sum(one.numel() for one in buffers if one is not None))
