"""Find tables with sparse gradients; report ids out of range to all ranks in the next sum.

torch raises IndexError only on the rank that has such an id, while the others would wait for its
gradients. So while a table trains, the id is noted and replaced by 0, and the next exchange raises
the error on all ranks (``channels.messages.row_sums``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.job.parameter_names import plain_name


class SparseTables:
    """The tables of a model, by the ``id`` of their weights.

    Attributes:
        names: names of the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, str] = {}
        self._hooks: list[Any] = []
        self._wrong: dict[int, int] = {}
        for name, table in tables_of(model):
            if id(table.weight) not in self.names:
                self.names[id(table.weight)] = f"{name}.weight" if name else "weight"
            hook = table.register_forward_pre_hook(self._look, with_kwargs=True)
            self._hooks.append(hook)

    def _look(self, table: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record an id that is out of range, and look up row 0 instead."""
        if not (table.training and torch.is_grad_enabled() and table.weight.requires_grad):
            return None
        key, rows = id(table.weight), table.num_embeddings
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor) or not ids.numel() or ids.is_floating_point():
            return None  # torch raises its own error
        low, high = (int(one) for one in torch.aminmax(ids.detach()))
        if low >= 0 and high < rows:
            return None
        self._wrong[key] = low if low < 0 else high
        ids = ids.where((ids >= 0) & (ids < rows), 0)
        return ((ids, *args[1:]), kwargs) if args else (args, {**kwargs, "input": ids})

    def leave(self) -> None:
        """Remove the hooks that check ids."""
        while self._hooks:
            self._hooks.pop().remove()

    def wrong(self, weight: Tensor) -> int | None:
        """Return, once, an out-of-range id that a batch of this rank contained."""
        return self._wrong.pop(id(weight), None)


def tables_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each torch embedding whose gradients are sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield plain_name(name), module
