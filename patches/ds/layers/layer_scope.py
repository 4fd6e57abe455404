"""Track the layer whose collectives run, for the tensor- and sequence-parallel DeepSpeed seams.

Upstream's layers look up collectives in the global ``dist`` of their module at call time. A
stand-in there keeps upstream's overlap, buffers and autograd functions. It acts only inside
autograd functions wrapped below, because the same modules gather parameters for checkpoints, which
must stay exact. Autograd functions have no reference to a layer, and backward passes run in other
threads, so the function's context stores the layer's channels.
"""

from __future__ import annotations

import importlib
from typing import Any

from hybridcomp.channels import ATTRIBUTE, Channels
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.log import say_once
from hybridcomp.patches.common.routes import OWNER, SENDER, Layers, Sender
from hybridcomp.patches.common.scope import Scope
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import has_module
from hybridcomp.session import process

#: classes whose objects are tagged with their engine's channels
LAYERS = frozenset({"TensorParallel_Layer", "DistributedAttention"})
_NOBODY = object()
#: channels of the running layer; None: its engine has no block
_OWNER: Scope[Any] = Scope("layer", _NOBODY)


def tag(engine: Any, channels: Channels | None) -> None:
    """Tag the layers of ``engine`` with its channels; None: the engine has no block."""
    for module in engine.module.modules():
        if not LAYERS.isdisjoint(cls.__name__ for cls in type(module).__mro__):
            setattr(module, ATTRIBUTE, channels)


def owner() -> Channels | None:
    """Return the running layer's channels; the process's channels for layers without an engine."""
    found = _OWNER.get()
    if found is _NOBODY:
        return process.current()
    channels: Channels | None = found
    return channels


@around
def make_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a layer's ``__call__`` to publish its channels; recomputation calls it again."""
    with _OWNER.inside(getattr(self, ATTRIBUTE, _NOBODY)):
        return original(self, *args, **kwargs)


@around
def make_forward(original: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``forward`` of an autograd function; inside a ``backward`` the direction is kept."""
    sender = SENDER.get() or Sender(owner(), "forward")
    setattr(ctx, OWNER, sender.channels)
    with SENDER.inside(sender):
        return original(ctx, *args, **kwargs)


@around
def make_layer_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``forward`` of a layer that calls collectives outside an autograd function."""
    with SENDER.inside(Sender(owner(), "forward")):
        return original(self, *args, **kwargs)


def whose() -> Channels | None:
    """Return the channels for the current collectives; None outside a wrapped function."""
    sender = SENDER.get()
    return None if sender is None else sender.channels


#: collectives inside a wrapped function: of tensor-parallel and of sequence-parallel layers
TENSOR = Layers(lambda group: "tp", whose=whose)
SEQUENCE = Layers(lambda group: "cp", whose=whose)


def upstream_has(module: str, name: str) -> bool:
    """Return whether a module of the installed DeepSpeed has ``name``; releases of 0.19 differ."""
    return has_module(module) and hasattr(importlib.import_module(module), name)


def refuse(channels: Channels, dimension: Dimension, found: str, reason: str, todo: str) -> None:
    """Raise ConfigError, or print a message, for a part of the model without seams.

    ``found``: description of that part, which sends messages of ``dimension``.
    """
    config = channels.config
    if not channels[dimension].active:
        return
    if config.on_unsupported == "error" and dimension in config.explicit:
        raise ConfigError(
            f"compression.{dimension}",
            found,
            f'{reason}; {todo}, set "{dimension}": "none", or set "on_unsupported": "native"',
        )
    say_once(f"{dimension} stays native in {found}: {reason}")
