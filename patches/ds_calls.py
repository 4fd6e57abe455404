"""What the tensor- and sequence-parallel seams of DeepSpeed share.

Upstream's layers reach collectives through the global ``dist`` of their module, looked up at call
time. A stand-in there keeps upstream's overlap, buffers and autograd functions. It acts only inside
an autograd function that a maker below wrapped: the same modules gather parameters for checkpoints,
which must stay exact. Functions know no layer, and backward passes run in other threads, so a
function's context remembers whose layer it served. No seam is here.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import ATTRIBUTE, Channel, Channels
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import native
from hybridcomp.errors import ConfigError
from hybridcomp.patches import process
from hybridcomp.patches.calls import _Namespace, flat
from hybridcomp.patches.mcore_ep import ANY_NUMEL
from hybridcomp.policy import Dimension, Direction

REQUIREMENT = "deepspeed >= 0.19, < 0.20"

#: classes whose objects are tagged with the channels of their engine
LAYERS = frozenset({"TensorParallel_Layer", "DistributedAttention"})
#: attribute of an autograd context: the channels of the layer it served
_CONTEXT = "_hybridcomp_owner"
_NOBODY = object()


@dataclass(frozen=True)
class Scope:
    """What the collectives called now are for."""

    channels: Channels | None
    direction: Direction


class _Local(threading.local):
    owner: Any = _NOBODY  # channels of the layer that runs, None: of an engine without a block
    scope: Scope | None = None


_local = _Local()


def tag(engine: Any, channels: Channels | None) -> None:
    """Tell the layers of ``engine`` whose they are; None: the engine has no block."""
    for module in engine.module.modules():
        if not LAYERS.isdisjoint(cls.__name__ for cls in type(module).__mro__):
            setattr(module, ATTRIBUTE, channels)


def owner() -> Channels | None:
    """The channels of the layer that runs; those of the process for layers of no engine."""
    found = _local.owner
    if found is _NOBODY:
        return process.current()
    channels: Channels | None = found
    return channels


@contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Collectives called inside are for ``scope``."""
    before = _local.scope
    _local.scope = scope
    try:
        yield
    finally:
        _local.scope = before


def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """``__call__`` of a layer: publish whose it is. Recomputation comes here again."""

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _local.owner
        _local.owner = getattr(self, ATTRIBUTE, _NOBODY)
        try:
            return original(self, *args, **kwargs)
        finally:
            _local.owner = before

    return __call__


def make_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of an autograd function; in its own backward pass it is the gradient's way."""

    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _local.scope or Scope(owner(), "forward")
        setattr(ctx, _CONTEXT, scope.channels)
        with inside(scope):
            return original(ctx, *args, **kwargs)

    return forward


def make_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` of an autograd function whose ``forward`` is wrapped."""

    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        with inside(Scope(getattr(ctx, _CONTEXT), "backward")):
            return original(ctx, *grads)

    return backward


def make_layer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a layer that calls collectives outside of an autograd function."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with inside(Scope(owner(), "forward")):
            return original(self, *args, **kwargs)

    return forward


@dataclass(frozen=True)
class _Route:
    """How one message travels encoded."""

    channel: Channel
    codec: Codec
    group: dist.ProcessGroup | None
    raw_nbytes: int
    direction: Direction

    @property
    def settings(self) -> dict[str, Any]:
        return {"raw_nbytes": self.raw_nbytes, "direction": self.direction}


def _route(
    dimension: Dimension,
    scope: Scope | None,
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    raw: Callable[[int, torch.dtype, int], int],
    numel: int | None = None,
) -> _Route | None:
    """The route of ``tensor``; None: not ours, or native and then written down.

    ``raw`` gives the bytes that upstream would send; ``numel`` is what the policy is asked with
    where the ranks' lengths differ.
    """
    world_size = dist.get_world_size(group)
    if scope is None or scope.channels is None or world_size < 2:
        return None
    channel = scope.channels[dimension]
    raw_nbytes = raw(tensor.numel(), tensor.dtype, world_size)
    asked = tensor.numel() if numel is None else numel
    codec = channel.codec(asked, tensor.dtype, group, scope.direction)
    if codec is None:
        channel.native(raw_nbytes, scope.direction)
        return None
    return _Route(channel, codec, group, raw_nbytes, scope.direction)


def make_all_reduce(
    applies: Callable[[], bool] = lambda: True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``deepspeed.comm.all_reduce`` of dimension ``tp``, where ``applies()``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(
            tensor: Tensor, group: Any = None, async_op: bool = False, **kwargs: Any
        ) -> Any:
            # a call with an operation or anything else is none that we know
            scope = _local.scope if not kwargs and applies() else None
            found = _route("tp", scope, tensor, group, native.all_reduce_nbytes)
            if found is None:
                asynchronous = {"async_op": True} if async_op else {}
                return original(tensor, group=group, **asynchronous, **kwargs)
            values = flat(tensor)
            handle = found.channel.all_reduce(
                values, found.codec, group, **found.settings, async_op=async_op
            )
            if values.data_ptr() != tensor.data_ptr():
                handle.then(lambda: _put(values, tensor))
            return handle if async_op else None

        return all_reduce

    return make


def make_all_gather_into_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """``deepspeed.comm.all_gather_into_tensor`` of dimension ``tp``."""

    @functools.wraps(original)
    def all_gather_into_tensor(
        output: Tensor, tensor: Tensor, group: Any = None, **kwargs: Any
    ) -> Any:
        scope = None if kwargs else _local.scope
        found = _route("tp", scope, tensor, group, native.all_gather_nbytes)
        if found is None:
            return original(output, tensor, group=group, **kwargs)
        out = output.detach().view(-1)
        found.channel.all_gather(flat(tensor), out, found.codec, group, **found.settings).wait()
        return None

    return all_gather_into_tensor


@dataclass(frozen=True)
class Directed:
    """A process group on which messages of one direction travel."""

    group: Any
    direction: Direction


def make_all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """``deepspeed.comm.all_to_all_single`` of dimension ``cp``; splits count rows.

    With splits the lengths differ from rank to rank and ``min_bytes`` does not count.
    """

    @functools.wraps(original)
    def all_to_all_single(
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        scope = _local.scope
        if isinstance(group, Directed):
            scope, group = Scope(owner(), group.direction), group.group
        gives = _elements(tensor, input_split_sizes)
        takes = _elements(output, output_split_sizes)
        if gives is None:
            found = _route("cp", scope, tensor, group, native.all_to_all_nbytes)
        else:
            away = sum(gives) - gives[dist.get_rank(group)]
            raw_nbytes = native.send_nbytes(away, tensor.dtype)
            found = _route("cp", scope, tensor, group, lambda *_: raw_nbytes, ANY_NUMEL)
        if found is None:
            splits: dict[str, Any] = {}
            if gives is not None or takes is not None:
                splits["output_split_sizes"] = output_split_sizes
                splits["input_split_sizes"] = input_split_sizes
            return original(output, tensor, **splits, group=group, async_op=async_op)
        handle = found.channel.all_to_all(
            output.detach().view(-1),
            flat(tensor),
            found.codec,
            group,
            **found.settings,
            out_splits=takes,
            in_splits=gives,
            async_op=async_op,
        )
        return handle if async_op else None

    return all_to_all_single


def _elements(tensor: Tensor, splits: Sequence[int] | None) -> list[int] | None:
    """Splits in elements of the flat tensor."""
    if splits is None:
        return None
    row = tensor.shape[1:].numel()
    return [int(split) * row for split in splits]


def _put(values: Tensor, out: Tensor) -> None:
    out.detach().copy_(values.view(out.shape))


def upstream_has(module: str, name: str) -> bool:
    """Whether the installed DeepSpeed has it; releases of 0.19 differ."""
    return hasattr(importlib.import_module(module), name)


def refuse(channels: Channels, dimension: Dimension, found: str, reason: str, todo: str) -> None:
    """A part of the model moves ``dimension`` where no seam is: raise ConfigError, or say so."""
    config = channels.config
    if not channels[dimension].active:
        return
    if config.on_unsupported == "error" and dimension in config.explicit:
        raise ConfigError(
            f"compression.{dimension}",
            found,
            f'{reason}; {todo}, set "{dimension}": "none", or set "on_unsupported": "native"',
        )
    process.say(f"{dimension} stays native in {found}: {reason}")


def make_dist(
    makers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Callable[[Any], Any]:
    """A maker of a stand-in for ``deepspeed.comm``; ``makers`` wrap collectives of it."""

    def make(original: Any) -> Any:
        wrapped = {name: make_one(getattr(original, name)) for name, make_one in makers.items()}
        return _Namespace(original, wrapped)

    return make
