"""Truncate messages to a few elements, to time a step without a wire.

Replaces torch.distributed's collectives and sends in this process. While ``set_empty`` is on, ranks
exchange a few elements, so that they still wait for each other, and fill the rest of a result with
their own values to keep sizes and magnitudes. For native training only: results are wrong, but
computation takes as long.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from gpt.torch_engines import Engine
from torch import Tensor

#: keyword names of arguments, by call
Arguments = dict[str, Any]
#: elements sent in place of a whole message
FEW = 16

_on = False


def set_empty(on: bool) -> None:
    """Turn message truncation on or off."""
    global _on
    _on = on


def few(tensor: Tensor, times: int = 1) -> Tensor:
    """Return the first elements as a vector."""
    return tensor.view(-1)[: FEW * times]


def small(tensor: Tensor) -> bool:
    """Return whether to send the message unchanged: it is small or not contiguous."""
    return tensor.numel() <= FEW or not tensor.is_contiguous()


def _one(native: Callable[..., Any], found: Arguments) -> Any:
    tensor = found["tensor"]
    if not small(tensor):
        found["tensor"] = few(tensor)
    return native(**found)


def _gather(native: Callable[..., Any], found: Arguments) -> Any:
    (out, output), (own, values) = list(found.items())[:2]
    if not small(values):
        ranks = output.numel() // values.numel()
        output.view(ranks, -1).copy_(values.view(1, -1).expand(ranks, -1))
        found[out], found[own] = few(output, ranks), few(values)
    return native(**found)


def _gather_list(native: Callable[..., Any], found: Arguments) -> Any:
    (out, outputs), (own, values) = list(found.items())[:2]
    if not small(values):
        for output in outputs:
            output.view(-1).copy_(values.view(-1))
        found[out], found[own] = [few(output) for output in outputs], few(values)
    return native(**found)


def _scatter(native: Callable[..., Any], found: Arguments) -> Any:
    (out, output), (own, values) = list(found.items())[:2]
    if not small(output):
        ranks = values.numel() // output.numel()
        output.view(-1).copy_(values.view(ranks, -1)[0])
        found[out], found[own] = few(output), few(values, ranks)
    return native(**found)


WRAPPERS = {
    "all_reduce": _one, "reduce": _one, "send": _one, "recv": _one, "isend": _one, "irecv": _one,
    "all_gather_into_tensor": _gather, "all_gather_single": _gather, "all_gather": _gather_list,
    "reduce_scatter_tensor": _scatter, "reduce_scatter_single": _scatter,
}  # fmt: skip


def install() -> None:
    """Patch this process before a DeepSpeed backend looks up the functions."""
    for name, cut in WRAPPERS.items():
        native = getattr(dist, name, None)
        if native is not None:
            setattr(dist, name, _wrapped(native, cut))
    setattr(Engine, "accumulating", _unreduced(Engine.accumulating))  # noqa: B010


def _unreduced(native: Callable[[Engine, bool], Any]) -> Callable[[Engine, bool], Any]:
    """Skip DDP's reductions while messages are truncated: its C++ bypasses the functions above."""

    def accumulating(self: Engine, last: bool) -> Any:
        return native(self, last and not (_on and self.kind == "ddp"))

    return accumulating


def _wrapped(native: Callable[..., Any], cut: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(native)

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _on:
            return native(*args, **kwargs)
        return cut(native, signature.bind(*args, **kwargs).arguments)

    return call
