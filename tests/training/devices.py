"""Run other tests' trainings on a GPU that several ranks share, over gloo.

gloo supports few CUDA operations. ``stage`` copies upstream's messages through the host; hybridcomp
stages its messages itself. With ``device="cpu"`` every tensor is staged as if on a GPU.
``tests.nccl`` covers NCCL.

``tests.ranks`` cannot use a GPU: its fork server has imported DeepSpeed for the CPU.
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

#: torch.distributed's collectives that upstream calls; those of this version are wrapped. Each
#: writes into its first argument and only reads the others
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "_all_gather_base", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "send",
    "recv",
)  # fmt: skip


class Done:
    """Handle of a finished call."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def append(self, work: Any) -> None:
        """Collect an operation as a coalescing manager does."""


class Received(Done):
    """An ``irecv`` that copies into the tensor in ``wait``."""

    def __init__(self, work: Any, target: Tensor, staged: Tensor) -> None:
        self._work, self._target, self._staged = work, target, staged

    def wait(self, *args: Any) -> bool:
        self._work.wait()
        self._target.copy_(self._staged)
        return True


def stage(device: str) -> None:
    """Replace tensors on ``device`` by host copies in gloo calls, for the rest of the process."""

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
            # copy back only outputs: stage 3 reduces into a part of the tensor that it sends, and
            # copying all would overwrite that part of the sum
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
        yield Done()  # all calls inside have finished when it returns

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
    """Copy a collective's result from the copies into a tensor, or a list of tensors."""
    if isinstance(target, Tensor):
        if target is not copied:
            target.copy_(copied)
    else:
        for one, other in zip(target, copied, strict=True):
            _bring_back(one, other)


def run_on(
    device: str, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 280.0
) -> list[Any]:
    """Run ``function(*args)`` on every rank on ``device`` (cpu, cuda); return results by rank.

    Several CPU ranks are forked; a single one, and all on a GPU, are new processes. Raises
    AssertionError with failing ranks' errors, TimeoutError with hanging ranks' stacks.
    """
    if device == "cpu" and world_size > 1:
        return run_ranks(world_size, _staged, device, function, args, timeout=timeout)
    with NcclPool(world_size, device=device, backend="gloo") as pool:
        return pool.run(_staged, device, function, args, timeout=timeout)


def _staged(device: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call on a rank with upstream's collectives staged."""
    if dist.get_world_size() > 1:
        stage(device)
    return function(*args)
