"""Find channel and direction of a message, for seams without an engine.

Upstream modules call raw collectives as ``torch.distributed.all_reduce``: their name is looked up
in the module's global ``torch`` at call time. A stand-in for ``torch`` there intercepts every such
call, keeps the overlap around it and copies no upstream code, which changes with every release.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hybridcomp.channels import Channel, Channels
from hybridcomp.dimensions import Dimension, Direction
from hybridcomp.patches.common.scope import Scope
from hybridcomp.seams.around import around
from hybridcomp.session.process import current


@dataclass(frozen=True)
class Sender:
    """The owner of the collectives that are being called, and the direction of their messages.

    ``channels``: those of the layer's engine; None: that engine has no block, or is unknown.
    """

    channels: Channels | None
    direction: Direction


#: None outside of the functions that a maker has wrapped
SENDER: Scope[Sender | None] = Scope("sender", None)
#: attribute of an autograd context: the channels of its layer
OWNER = "_hybridcomp_owner"


def direction() -> Direction:
    """Return ``backward`` inside a method made by ``make_backward``, else ``forward``.

    Recomputation runs forward methods inside the backward pass; they are not marked, so they use
    the same codec as the first time.
    """
    sender = SENDER.get()
    return "forward" if sender is None else sender.direction


@around
def make_backward(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark the messages of a backward method as ``backward`` and as those of its layer."""
    channels = getattr(args[0], OWNER, None) if args else None
    with SENDER.inside(Sender(channels, "backward")):
        return original(*args, **kwargs)


@dataclass(frozen=True)
class Layers:
    """Dimension, direction and channels of the collectives of some layers.

    Attributes:
        dimension: returns the dimension of a group; None: its messages stay exact.
        way: returns the direction of the message that is being sent now.
        whose: returns the channels for that message; None: those of the process.
    """

    dimension: Callable[[dist.ProcessGroup | None], Dimension | None]
    way: Callable[[], Direction] = direction
    whose: Callable[[], Channels | None] | None = None

    def channel(self, group: dist.ProcessGroup | None) -> Channel | None:
        """Return the channel of messages in ``group``; None: upstream sends them, uncounted."""
        channels = current() if self.whose is None else self.whose()
        if channels is None or dist.get_world_size(group) < 2:
            return None
        dimension = self.dimension(group)
        return None if dimension is None else channels[dimension]


class Namespace(types.ModuleType):
    """Module with some names replaced; all others are looked up in the real one."""

    def __init__(self, real: Any, replaced: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, f"{real.__name__}, as seen by a patched module")
        self.__dict__.update(replaced)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


Makers = Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]


def make_stand_in(makers: Makers) -> Callable[[Any], Any]:
    """Return a function that replaces a module of collectives; ``makers`` wrap some of them."""

    def make(original: Any) -> Any:
        wrapped = {name: make_one(getattr(original, name)) for name, make_one in makers.items()}
        return Namespace(original, wrapped)

    return make


def make_torch(makers: Makers) -> Callable[[Any], Any]:
    """Return a function that replaces ``torch``; ``makers`` wrap functions of ``distributed``."""

    stand_in = make_stand_in(makers)

    def make(original: Any) -> Any:
        return Namespace(original, {"distributed": stand_in(original.distributed)})

    return make
