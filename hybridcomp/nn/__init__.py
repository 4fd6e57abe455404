"""Layers and operations that shard a model in ways that no upstream offers.

While ``patches`` takes over the messages that upstream sends, the layers of this package send their
own messages: through the channels, or natively if the process has no block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridcomp.nn.context.attention import RingAttention, ring_attention
    from hybridcomp.nn.context.layout import (
        documents_of,
        documents_of_mask,
        gather,
        positions,
        shard,
        unshard,
    )
    from hybridcomp.nn.tables import CachedEmbedding, RowOptimizer, ngram_keys

#: public name -> module that defines it, imported on first use
_NAMES = {
    "CachedEmbedding": "hybridcomp.nn.tables",
    "RingAttention": "hybridcomp.nn.context.attention",
    "RowOptimizer": "hybridcomp.nn.tables",
    "documents_of": "hybridcomp.nn.context.layout",
    "documents_of_mask": "hybridcomp.nn.context.layout",
    "gather": "hybridcomp.nn.context.layout",
    "ngram_keys": "hybridcomp.nn.tables",
    "positions": "hybridcomp.nn.context.layout",
    "ring_attention": "hybridcomp.nn.context.attention",
    "shard": "hybridcomp.nn.context.layout",
    "unshard": "hybridcomp.nn.context.layout",
}

#: modules with a row in the support matrix, made from the module's COVERS, its docstring's first
#: sentence, and REQUIREMENT, if the module needs more than torch
_ROWS = ("context.attention", "huggingface", "slices", "tables", "tp2d")

__all__ = [
    "CachedEmbedding", "RingAttention", "RowOptimizer", "documents_of", "documents_of_mask",
    "gather", "ngram_keys", "positions", "ring_attention", "shard", "unshard",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def has_tables() -> bool:
    """Return whether this process has a ``CachedEmbedding``, without importing its module."""
    module = sys.modules.get("hybridcomp.nn.tables.embedding")
    return module is not None and bool(module.TABLES)


def rows(torch: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the support matrix: dimension, first sentence of a module, versions.

    ``torch``: the requirement of modules that need only torch.
    """
    for name in _ROWS:
        module = import_module(f"{__name__}.{name}")
        what = (module.__doc__ or "").partition("\n\n")[0].partition(", dimension ``")[0]
        for dimension in module.COVERS:
            requirement = getattr(module, "REQUIREMENT", torch)
            yield dimension, " ".join(what.split()).rstrip("."), requirement
