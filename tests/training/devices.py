"""Trainings of the other tests on a GPU, several ranks sharing it: gloo, one process a rank.

gloo takes few CUDA tensors. What upstream sends itself goes through copies on the host here
(``stage``); what hybridcomp sends it stages by its own means. The same functions run with
``device="cpu"``, where every tensor is staged as if it were on a GPU. ``tests.nccl`` has NCCL.

``tests.ranks`` will not do on a GPU: its fork server has imported DeepSpeed for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl.pool import NcclPool
from tests.ranks import run_ranks

#: collectives of torch.distributed that upstream calls; all that this version has are wrapped. Each
#: writes into its first argument and only reads the others
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "_all_gather_base", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "send",
    "recv",
)  # fmt: skip


class Done:
    """The work of a call that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def append(self, work: Any) -> None:
        """As a coalescing manager."""


class Received(Done):
    """An ``irecv``: copies into the tensor when it is waited for."""

    def __init__(self, work: Any, target: Tensor, staged: Tensor) -> None:
        self._work, self._target, self._staged = work, target, staged

    def wait(self, *args: Any) -> bool:
        self._work.wait()
        self._target.copy_(self._staged)
        return True


def stage(device: str) -> None:
    """Let gloo see copies on the host of tensors on ``device``; for the rest of the process."""

    def foreign(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(foreign, value))
        return isinstance(value, Tensor) and value.device.type == device

    def host(value: Any) -> Any:
        if not foreign(value):
            return value
        if isinstance(value, (list, tuple)):
            return [host(part) for part in value]
        return value.detach().to("cpu", copy=True).contiguous()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        written = next(iter(inspect.signature(original).parameters))

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not foreign([*args, *kwargs.values()]):
                return original(*args, **kwargs)
            positional = list(map(host, args))
            named = {name: host(value) for name, value in kwargs.items()}
            waits = named.pop("async_op", False)
            result = original(*positional, **named)
            # back only what is written: stage 3 reduces into a part of the tensor that it sends,
            # and the part of the sum was overwritten with what this rank had put there
            if original.__name__ != "send":
                out = (args[0], positional[0]) if args else (kwargs[written], named[written])
                _bring_back(*out)
            return Done() if waits else result

        return call

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return posts["isend"](tensor.cpu() if foreign(tensor) else tensor, *args, **kwargs)

    def irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not foreign(tensor):
            return posts["irecv"](tensor, *args, **kwargs)
        staged = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Received(posts["irecv"](staged, *args, **kwargs), tensor, staged)

    @contextlib.contextmanager
    def _coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[Done]:
        yield Done()  # every call inside is over when it returns

    posts = {"isend": dist.isend, "irecv": dist.irecv}
    replaced: dict[str, Any] = {
        name: wrap(getattr(dist, name)) for name in COLLECTIVES if hasattr(dist, name)
    }
    replaced |= {"isend": isend, "irecv": irecv, "_coalescing_manager": _coalescing_manager}
    for name, replacement in replaced.items():
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, replacement)


@torch.no_grad()
def _bring_back(target: Any, copied: Any) -> None:
    """Into a tensor, or a list of them, what a collective left in the copy."""
    if isinstance(target, Tensor):
        if target is not copied:
            target.copy_(copied)
    else:
        for one, other in zip(target, copied, strict=True):
            _bring_back(one, other)


def run_on(
    device: str, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 280.0
) -> list[Any]:
    """``function(*args)`` on every rank, on ``device`` (cpu, cuda); the results by rank.

    Several ranks on a CPU are forked; one is a process of its own, as all are on a GPU. Raises
    AssertionError with what failing ranks said, TimeoutError with where they hang.
    """
    if device == "cpu" and world_size > 1:
        return run_ranks(world_size, _staged, device, function, args, timeout=timeout)
    with NcclPool(world_size, device=device, backend="gloo") as pool:
        return pool.run(_staged, device, function, args, timeout=timeout)


def _staged(device: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """On a rank: call, with upstream's collectives staged."""
    if dist.get_world_size() > 1:
        stage(device)
    return function(*args)
