"""Small collectives in which ranks agree: sums, extremes and objects, no training traffic.

All functions are collectives over ``group`` (None: the whole job), except ``cut_off``, and block
until the result is there, except ``start_least``. Inside an operation (``together``), all ranks or
none send the message. Training traffic goes through ``collectives/wire/transport.py`` instead,
which counts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.job.gates import gate

T = TypeVar("T")
#: tag of a message that no rank sends
TAG_OF_NONE = int.from_bytes(b"none", "big") >> 1


def total(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum ``values`` over the ranks in place and return them."""
    gate(group)
    dist.all_reduce(values, group=group)
    return values


def most(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Take the largest of all ranks, element by element, in place; return ``values``."""
    gate(group)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def least(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Take the smallest of all ranks, element by element, in place; return ``values``."""
    gate(group)
    dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    return values


def start_least(values: Tensor, group: ProcessGroup | None = None) -> Callable[[], Tensor]:
    """Begin ``least``; return a function that waits for the result and returns it."""
    work = dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group, async_op=True)

    def result() -> Tensor:
        work.wait()
        return values

    return result


def gather(own: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks in rank order; all have the shape of ``own``."""
    own = own.detach().contiguous()
    parts = [own.new_empty(own.shape) for _ in range(dist.get_world_size(group))]
    gate(group)
    dist.all_gather(parts, own, group=group)
    return parts


def gather_objects(own: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks in rank order."""
    every: list[Any] = [None] * dist.get_world_size(group)
    gate(group)
    dist.all_gather_object(every, own, group=group)
    return every


def from_first(own: T) -> T:
    """Return global rank 0's object on all ranks."""
    box = [own]
    gate()
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all(group: ProcessGroup | None = None) -> None:
    """Return once all ranks have called this."""
    gate(group)
    dist.barrier(group)


def cut_off(group: ProcessGroup) -> None:
    """Close this rank's connections in ``group``, so that ranks waiting for it there fail.

    The group is unusable afterwards. Over NCCL ``abort`` closes the connections, but not over gloo:
    there a receive that times out closes all connections of this rank. A receive from a rank that
    has closed its own connections fails before it times out, so this tries one from every rank.
    """
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    is_gloo = False
    with contextlib.suppress(RuntimeError, AttributeError, dist.DistError):
        is_gloo = "gloo" in dist.get_backend_config(group)
    for other in others if is_gloo else ():
        with contextlib.suppress(RuntimeError, AttributeError, dist.DistError):
            work = dist.irecv(
                torch.empty(1, dtype=torch.float32, device="cpu"),
                other,
                group=group,
                tag=TAG_OF_NONE,
            )
            assert work is not None, "this rank is in the group"
            work.wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError, AttributeError, dist.DistError):
        if "nccl" in dist.get_backend_config(group):
            group.abort()
