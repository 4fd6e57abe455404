"""Messages in which the ranks of a job agree: sums, extremes and objects, no traffic of training.

They are collectives over ``group``, None for the job, and block until the result is there, but for
``start_least``. As parts of an operation all ranks send them or none (``together``). Traffic of
training goes through ``collectives/wire/transport.py``: that counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.job.gates import gate

T = TypeVar("T")


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
    """Begin ``least``; return what waits for its result and returns it."""
    work = dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group, async_op=True)

    def result() -> Tensor:
        work.wait()
        return values

    return result


def gather(own: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks in rank order; ``own`` has one shape on all of them."""
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
    """Return the object of global rank 0 on all ranks."""
    box = [own]
    gate()
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all(group: ProcessGroup | None = None) -> None:
    """Return once all ranks have called this."""
    gate(group)
    dist.barrier(group)
