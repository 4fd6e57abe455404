"""Count host copies of GPU messages over gloo."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hybridcomp.collectives.wire.staging import Staging


class CountedStaging(Staging):
    """Stage this CPU's messages as a GPU's over gloo; counts copied bytes, ``now`` and ``most``."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self.now = self.most = 0

    def needed(self, tensor: Tensor, group: Any) -> bool:
        return True

    def room(self, like: Tensor) -> Tensor:
        made = torch.empty_like(like)
        self.now += made.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(made, self.gone, made.nbytes)
        return made

    def gone(self, nbytes: int) -> None:
        self.now -= nbytes
