"""Count all messages of torch.distributed, from any caller: an oracle beside the ledger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts messages, and the bytes of their tensors, by operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_operation: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            held = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            count, nbytes = self.by_operation.get(name, (0, 0))
            nbytes += sum(one.numel() * one.element_size() for one in held)
            self.by_operation[name] = (count + 1, nbytes)
        return func(*args, **(kwargs or {}))


def sent_in(step: Any) -> dict[str, tuple[int, int]]:
    """Return messages and bytes of ``step()`` by operation."""
    mode = SentBytes()
    with mode:
        step()
    torch.distributed.barrier()
    return mode.by_operation
