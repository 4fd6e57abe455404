"""Layers and operations whose own traffic goes through the channels: other cuts of a model.

What upstream sends is taken over by the seams of ``patches`` and the slots of ``engines``. This
room holds what no upstream has: ways to cut a model whose messages exist in hybridcomp alone.
Without a block they send natively.
"""

from __future__ import annotations

from typing import Any

#: public name -> the module that has it, imported when it is asked for
_NAMES = {
    "RingAttention": "hybridcomp.nn.context.attention",
    "documents_of": "hybridcomp.nn.context.layout",
    "documents_of_mask": "hybridcomp.nn.context.layout",
    "gather": "hybridcomp.nn.context.layout",
    "positions": "hybridcomp.nn.context.layout",
    "ring_attention": "hybridcomp.nn.context.attention",
    "shard": "hybridcomp.nn.context.layout",
    "unshard": "hybridcomp.nn.context.layout",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        from importlib import import_module

        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
