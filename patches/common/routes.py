"""Choose channel, codec and direction of a message, for seams without an engine.

Upstream modules call raw collectives as ``torch.distributed.all_reduce``: their name is looked up
in the module's global ``torch`` at call time. A stand-in for ``torch`` there intercepts every such
call, keeps the overlap around it and copies no upstream code, which changes with every release.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, Channels, ReduceScatterHandle
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.patching import Seam
from hybridcomp.policy import Dimension, Direction
from hybridcomp.session.process import current

_local = threading.local()  # autograd runs backward passes of several devices in threads


@dataclass(frozen=True)
class Route:
    """Channel, codec and direction of one encoded message."""

    channel: Channel
    codec: Codec
    direction: Direction
    raw_nbytes: int

    def reduce_scatter(
        self,
        shards: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        *,
        pieces: Sequence[Sequence[Piece]] | None = None,
        async_op: bool,
    ) -> ReduceScatterHandle:
        """Call ``Channel.reduce_scatter`` with codec, direction and bytes of this message."""
        return self.channel.reduce_scatter(
            shards,
            self.codec,
            group,
            raw_nbytes=self.raw_nbytes,
            pieces=pieces,
            direction=self.direction,
            async_op=async_op,
        )


def route(
    dimension: Dimension | None,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    raw_nbytes: int,
    direction: Direction = "forward",
    whose: Callable[[], Channels | None] | None = None,
) -> Route | None:
    """Return the route of a message; None: not compressed here, or native, which is then counted.

    ``whose``: returns the channels; without it they are those of the process.
    """
    channels = current() if whose is None else whose()
    if channels is None or dimension is None or dist.get_world_size(group) < 2:
        return None
    channel = channels[dimension]
    codec = channel.codec(numel, dtype, group, direction)
    if codec is None:
        channel.native(raw_nbytes, direction)
        return None
    return Route(channel, codec, direction, raw_nbytes)


def flat(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor``, 1-D and contiguous: a view where that is possible."""
    return tensor.detach().contiguous().view(-1)


def direction() -> Direction:
    """Return ``backward`` inside a method made by ``make_backward``, else ``forward``.

    Recomputation runs forward methods inside the backward pass; they are not marked, so they use
    the same codec as the first time.
    """
    return "backward" if getattr(_local, "backward", False) else "forward"


def make_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark messages sent inside as backward."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_local, "backward", False)
        _local.backward = True
        try:
            return original(*args, **kwargs)
        finally:
            _local.backward = before

    return backward


@dataclass(frozen=True)
class Layers:
    """Dimension, direction and channels of the collectives of some layers.

    Attributes:
        dimension: returns the dimension of a group; None: its messages stay exact.
        way: returns the direction of the message that is being sent now.
        whose: returns the channels for it; without it those of the process.
    """

    dimension: Callable[[dist.ProcessGroup | None], Dimension | None]
    way: Callable[[], Direction] = direction
    whose: Callable[[], Channels | None] | None = None

    def route(
        self, numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None, raw_nbytes: int
    ) -> Route | None:
        """Return the route of a message of ``numel`` elements; None: upstream sends it."""
        return route(self.dimension(group), numel, dtype, group, raw_nbytes, self.way(), self.whose)

    def leave_native(self, group: dist.ProcessGroup | None, raw_nbytes: int) -> None:
        """Count a message that no codec may change."""
        channels = current() if self.whose is None else self.whose()
        dimension = self.dimension(group)
        if channels is not None and dimension is not None and dist.get_world_size(group) > 1:
            channels[dimension].native(raw_nbytes, self.way())


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
    """Return a maker of a stand-in for a module of collectives, some of which ``makers`` wrap."""

    def make(original: Any) -> Any:
        wrapped = {name: make_one(getattr(original, name)) for name, make_one in makers.items()}
        return Namespace(original, wrapped)

    return make


def torch_seam(module: str, requirement: str, source: Callable[[], str] | None = None) -> Seam:
    """Return the seam of the global ``torch`` of an upstream module."""
    return Seam(requirement, module, "torch", None, source)


def make_torch(makers: Makers) -> Callable[[Any], Any]:
    """Return a maker of a stand-in for ``torch``; ``makers`` wrap functions of ``distributed``."""

    stand_in = make_stand_in(makers)

    def make(original: Any) -> Any:
        return Namespace(original, {"distributed": stand_in(original.distributed)})

    return make
