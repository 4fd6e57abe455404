"""Count the bytes that torch allocates until their last reference, as on a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode

from hybridcomp.collectives.wire.encoding import POOL

#: untyped in torch
StorageWeakRef: Any = reductions.StorageWeakRef


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of this thread's new tensors while entered, ``now`` and at ``most``.

    The pool keeps no buffer, and allocates exactly the requested length.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._live: dict[int, tuple[Any, int]] = {}
        self._known: dict[int, Any] = {}
        self._patches = ExitStack()

    @property
    def now(self) -> int:
        """Drop freed tensors; return the bytes of the rest."""
        for live in (self._live, self._known):
            for key in [key for key, (alive, _) in live.items() if alive.expired()]:
                del live[key]
        return sum(nbytes for _, nbytes in self._live.values())

    def __enter__(self) -> Allocated:
        enter = self._patches.enter_context
        enter(mock.patch.object(POOL, "take", self._take))
        enter(mock.patch.object(POOL, "give", lambda *buffers: None))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors(args):  # created before it was entered, unless it is known
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._known[storage._cdata] = StorageWeakRef(storage), 0
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            before = self._live.get(storage._cdata) or self._known.get(storage._cdata)
            if before is None or before[0].expired():
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.most = max(self.most, self.now)
        return found

    def _take(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
