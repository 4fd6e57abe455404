"""Bytes between ranks: the only calls into torch.distributed.

Every call is posted asynchronously and its work yielded, so that a handle decides when to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hybridcomp.collectives.wire import gloo_pairs, pinned_staging
from hybridcomp.collectives.wire.handle import Steps

Post = Callable[[Tensor, Tensor], Work]

#: torch 2.13 renames it and warns about the old name
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(
    out: Tensor,
    values: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    group: ProcessGroup | None,
) -> Steps[None]:
    """Exchange 1-D parts of ``values`` of any lengths, of a dtype that the backend takes.

    Where ``mesh.suits``, ``out_splits`` may be more than what comes.
    """

    def post(target: Tensor, source: Tensor) -> Work:
        takes, gives = list(out_splits), list(in_splits)
        if gloo_pairs.suits(target.device, group):
            return gloo_pairs.all_to_all(
                torch.split(target, takes), torch.split(source, gives), group
            )
        work: Work = dist.all_to_all_single(
            target, source, takes, gives, group=group, async_op=True
        )
        return work

    yield from _transfer(post, out, values, group)


def all_gather(out: Tensor, values: Tensor, group: ProcessGroup | None) -> Steps[None]:
    """Gather the ``values`` of all ranks, equally long, into ``out``."""

    def post(target: Tensor, source: Tensor) -> Work:
        if gloo_pairs.suits(target.device, group):
            places = torch.tensor_split(target, dist.get_world_size(group))
            return gloo_pairs.all_to_all(places, [source] * len(places), group)
        work: Work = all_gather_single(target, source, group=group, async_op=True)
        return work

    yield from _transfer(post, out, values, group)


def all_gather_uneven(
    out: Tensor, values: Tensor, rooms: Sequence[int], group: ProcessGroup | None
) -> Steps[None]:
    """Gather ``values`` of any lengths; only where ``mesh.suits``.

    ``rooms``: by rank, the elements of ``out`` for what comes from there, at least as many as come;
    just as many for this rank's own.
    """
    yield gloo_pairs.all_to_all(torch.split(out, list(rooms)), [values] * len(rooms), group)


def all_reduce(values: Tensor, group: ProcessGroup | None) -> Steps[None]:
    """Sum ``values`` in place; every rank gets the same bits."""
    staged = pinned_staging.STAGING.needed(values, group)
    target = pinned_staging.STAGING.out(values) if staged else values
    work: Work = dist.all_reduce(target, group=group, async_op=True)
    yield work
    if staged:
        pinned_staging.STAGING.back(target, values)


def send(values: Tensor, dst: int, group: ProcessGroup | None) -> Steps[None]:
    """Send to the global rank ``dst``."""

    def post(_: Tensor, source: Tensor) -> Work:
        work = dist.isend(source, dst, group=group)
        assert work is not None, "this rank is not in the group"
        return gloo_pairs.limited(work, source.device, group)

    yield from _transfer(post, values[:0], values, group)


def recv(out: Tensor, src: int, group: ProcessGroup | None) -> Steps[None]:
    """Receive from the global rank ``src``."""

    def post(target: Tensor, _: Tensor) -> Work:
        work = dist.irecv(target, src, group=group)
        assert work is not None, "this rank is not in the group"
        return gloo_pairs.limited(work, target.device, group)

    yield from _transfer(post, out, out[:0], group)


def _transfer(post: Post, out: Tensor, values: Tensor, group: ProcessGroup | None) -> Steps[None]:
    """Post one transfer, through host memory where the group's backend takes no GPU tensors."""
    if pinned_staging.STAGING.needed(out, group):
        host_in, host_out = pinned_staging.STAGING.out(values), pinned_staging.STAGING.room(out)
        yield post(host_out, host_in)
        pinned_staging.STAGING.back(host_out, out)
    else:
        yield post(out, values)
