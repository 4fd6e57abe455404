"""Send bytes between ranks: the only calls into torch.distributed, each counted by its meter.

Every call posts its message asynchronously and returns the work, which steps yield, so that a
handle decides when to wait. Nothing here is a generator: over NCCL a call takes the host little
more time than torch's.

Over gloo, all-to-all and all-gather are messages between pairs, with receives posted first. gloo
sends a message once its receiver has announced that it is ready. In gloo's own collectives a rank
may start to send data before it announces that it is ready: the announcement then queues after the
data, and the two directions of a link run one after the other. Between two ranks at 71 Mb/s and at
1 Gb/s this happened to about half of all messages above 0.4 MB and doubled their time. With
receives posted before any send, announcements are sent first. The bytes are the same.

GPU tensors over gloo go through pinned host memory (``staging``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter
from hybridcomp.collectives.wire.splits import Splits
from hybridcomp.collectives.wire.staging import STAGING, Staged
from hybridcomp.job.gates import here

#: names of torch's calls, which 2.13 renames with a warning for the old names. Each call looks them
#: up, since a replacement that counts or delays messages may be installed after this import
GATHER, SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
#: tag of messages between pairs, which keeps gloo from matching them with the training program's
TAG = int.from_bytes(b"hc", "big")
#: maximum abandoned works; the oldest is waited for beyond that
MOST_FORGOTTEN = 64


class Works(Work):
    """Several works as one, with a time limit for each of them; None: the backend's limit."""

    #: works deleted without a wait. gloo cancels a receive when its work is freed, and the message
    #: would then be matched with the next receive from the same sender
    forgotten: ClassVar[deque[list[Work]]] = deque()

    def __init__(self, works: Sequence[Work], limit: timedelta | None) -> None:
        super().__init__()
        self._works, self._limit = list(works), limit
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all works; raise, at every call, the error of the first that failed."""
        if self._error is not None:
            raise self._error
        works, self._works = self._works, []
        limit = self._limit if timeout is None else timeout
        try:
            for work in works:  # gloo does not apply the group's timeout to a receive by itself
                work.wait() if limit is None else work.wait(limit)
        except Exception as error:
            self._error = error
            raise
        return True

    def __del__(self) -> None:
        if self._works:
            self.forgotten.append(self._works)

    @classmethod
    def wait_for_forgotten(cls) -> None:
        """Wait for the oldest abandoned works, which are complete, since pairs keep message order.

        The last ``MOST_FORGOTTEN`` stay abandoned, since their messages may still be on their way.
        """
        while len(cls.forgotten) > MOST_FORGOTTEN:
            for work in cls.forgotten.popleft():
                work.wait()


def all_gather_single(
    out: Tensor, values: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gather ``values`` of all ranks into ``out`` natively; return the work if ``async_op``."""
    work: Work | None = getattr(dist, GATHER)(out, values, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    out: Tensor,
    values: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce-scatter ``values`` into ``out`` natively; return the work if ``async_op``."""
    work: Work | None = getattr(dist, SCATTER)(out, values, op, group=group, async_op=async_op)
    return work


def all_to_all(
    out: Tensor,
    values: Tensor,
    out_splits: list[int] | Splits,
    in_splits: list[int] | Splits,
    group: Group,
    meter: Meter,
) -> Work:
    """Exchange 1-D parts of ``values``, of any lengths and any dtype that the backend accepts.

    Over gloo ``out_splits`` may be longer than the parts that arrive. Passing ``Splits`` again
    saves adding up the lengths.
    """
    if isinstance(in_splits, Splits):
        sent, far = in_splits.beyond[group.rank, group.remote]
    else:
        sent = sum(in_splits) - in_splits[group.rank]
        far = sum([in_splits[rank] for rank in group.remote])
    meter.sent(values.itemsize * sent, values.itemsize * far)
    takes = out_splits.numels if isinstance(out_splits, Splits) else out_splits
    gives = in_splits.numels if isinstance(in_splits, Splits) else in_splits
    staged = out.device.type in STAGING.devices and STAGING.needed(out, group)
    room, source = (STAGING.room(out), STAGING.out(values)) if staged else (out, values)
    work: Work
    if not room.is_cuda and group.backends.get("cpu") == "gloo":
        work = between_pairs(torch.split(room, takes), torch.split(source, gives), group)
    else:
        work = dist.all_to_all_single(
            room, source, takes, gives, group=group.process_group, async_op=True
        )
    return Staged(work, room, out) if staged else work


def all_gather(out: Tensor, values: Tensor, group: Group, meter: Meter) -> Work:
    """Gather the ``values`` of all ranks, equally long, into ``out``."""
    nbytes = (group.size - 1) * values.nbytes  # a ring: all bytes go to the next rank
    meter.sent(nbytes, nbytes * int(group.ring))
    staged = out.device.type in STAGING.devices and STAGING.needed(out, group)
    room, source = (STAGING.room(out), STAGING.out(values)) if staged else (out, values)
    for operation in here.operations:
        operation.before_message()
    work: Work
    if not room.is_cuda and group.backends.get("cpu") == "gloo":
        places = torch.tensor_split(room, group.size)
        work = between_pairs(places, [source] * len(places), group)
    else:
        work = getattr(dist, GATHER)(room, source, group=group.process_group, async_op=True)
    return Staged(work, room, out) if staged else work


def gather_in_node(out: Tensor, values: Tensor, group: Group) -> Work | None:
    """Gather between CPUs of one node over gloo as ``all_gather`` does, uncounted; None elsewhere.

    Messages between pairs take half the CPU time of gloo's own all-gather, which copies all values
    once more. Between nodes gloo's ring is better, since it crosses the link less often.
    """
    if out.is_cuda or group.remote or group.backends.get("cpu") != "gloo":
        return None
    places = torch.tensor_split(out, group.size)
    return between_pairs(places, [values] * len(places), group)


def all_gather_uneven(
    out: Tensor, values: Tensor, rooms: list[int], group: Group, meter: Meter
) -> Work:
    """Gather ``values`` of any lengths; only over gloo between CPUs.

    ``rooms``: for each rank, the elements of ``out`` reserved for its values: at least as many as
    it sends, for this rank exactly as many.
    """
    nbytes = (group.size - 1) * values.nbytes  # a ring: all bytes go to the next rank
    meter.sent(nbytes, nbytes * int(group.ring))
    places = torch.split(out, rooms)
    for operation in here.operations:
        operation.before_message()
    return between_pairs(places, [values] * len(rooms), group)


def broadcast(values: Tensor, root: int, group: Group, meter: Meter) -> Work:
    """Broadcast ``values`` of group rank ``root`` into the ``values`` of all other ranks.

    The root counts all bytes, one copy per other rank, even if other ranks forward them.
    """
    sends = group.rank == root
    if sends:
        meter.sent(values.nbytes * (group.size - 1), values.nbytes * len(group.remote))
    if not STAGING.needed(values, group):
        return _spread(values, root, sends, group)
    if sends:
        return _spread(STAGING.out(values), root, sends, group)
    room = STAGING.room(values)
    return Staged(_spread(room, root, sends, group), room, values)


def _spread(values: Tensor, root: int, sends: bool, group: Group) -> Work:
    if group.backends.get(values.device.type) == "gloo":
        nothing = [values.new_empty(0)] * group.size
        if sends:
            to = [values if rank != root else values[:0] for rank in range(group.size)]
            return between_pairs(nothing, to, group)
        come = [values if rank == root else values[:0] for rank in range(group.size)]
        return between_pairs(come, nothing, group)
    own = group.process_group
    return _posted(dist.broadcast(values, group.global_ranks[root], group=own, async_op=True))


def all_reduce(values: Tensor, group: Group, meter: Meter) -> Work:
    """Sum ``values`` in place; every rank gets the same bits."""
    # a ring, twice around: reduce-scatter and all-gather
    nbytes = 2 * (group.size - 1) * values.nbytes // group.size
    meter.sent(nbytes, nbytes * int(group.ring))
    staged = STAGING.needed(values, group)
    target = STAGING.out(values) if staged else values
    work: Work = dist.all_reduce(target, group=group.process_group, async_op=True)
    return Staged(work, target, values) if staged else work


def send(values: Tensor, dst: int, group: Group, meter: Meter) -> Work:
    """Send to the global rank ``dst``."""
    meter.sent(values.nbytes)
    source = STAGING.out(values) if STAGING.needed(values, group) else values
    return _limited(_posted(dist.isend(source, dst, group=group.process_group)), source, group)


def recv(out: Tensor, src: int, group: Group) -> Work:
    """Receive from the global rank ``src``; the sender counts the bytes."""
    staged = STAGING.needed(out, group)
    target = STAGING.room(out) if staged else out
    work = _limited(_posted(dist.irecv(target, src, group=group.process_group)), target, group)
    return Staged(work, target, out) if staged else work


def shift(
    out: Tensor | None,
    values: Tensor | None,
    src: int,
    dst: int,
    group: Group,
    meter: Meter,
) -> Work:
    """Send ``values`` to group rank ``dst`` and receive ``out`` from group rank ``src``, at once.

    ``values`` None: send nothing; ``out`` None: receive nothing; both sides must agree. ``out`` is
    as long as the message; over gloo it may be longer.
    """
    if values is not None:
        meter.sent(values.nbytes, values.nbytes * int(dst in group.remote))
    like = values if out is None else out
    if like is None:
        return Works([], None)
    if not STAGING.needed(like, group):
        return _between_two(out, values, src, dst, group)
    source = None if values is None else STAGING.out(values)
    if out is None:
        return _between_two(None, source, src, dst, group)
    room = STAGING.room(out)
    return Staged(_between_two(room, source, src, dst, group), room, out)


def _between_two(
    out: Tensor | None, values: Tensor | None, src: int, dst: int, group: Group
) -> Work:
    """Post a receive and then a send; over NCCL as one call, so neither waits for the other."""
    ranks, own = group.global_ranks, group.process_group
    kind = (values if out is None else out).device.type  # type: ignore[union-attr]
    if group.backends.get(kind) != "gloo":
        calls = [] if out is None else [dist.P2POp(dist.irecv, out, ranks[src], group=own)]
        if values is not None:
            calls.append(dist.P2POp(dist.isend, values, ranks[dst], group=own))
        return Works(dist.batch_isend_irecv(calls), None)
    works = []
    if out is not None:
        works.append(_posted(dist.irecv(out, ranks[src], group=own, tag=TAG)))
    if values is not None:
        works.append(_posted(dist.isend(values, ranks[dst], group=own, tag=TAG)))
    return Works(works, group.limit)


def _posted(work: Work | None) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


def between_pairs(out: Sequence[Tensor], values: Sequence[Tensor], group: Group) -> Work:
    """Send ``values[r]`` to group rank r and receive ``out[r]`` from it, over gloo.

    Empty tensors are not sent; both sides must agree on which are empty. ``out[r]`` may be longer
    than the message: gloo only requires that it fits.
    """
    if len(Works.forgotten) > MOST_FORGOTTEN:
        Works.wait_for_forgotten()
    me, ranks, world = group.rank, len(out), group.global_ranks
    if out[me].data_ptr() != values[me].data_ptr():
        out[me].copy_(values[me])
    # every rank begins with a different peer, so that no rank receives all messages at once
    others = [(me + step) % ranks for step in range(1, ranks)]
    own = group.process_group
    works = [
        dist.irecv(out[rank], world[rank], group=own, tag=TAG)
        for rank in reversed(others)
        if out[rank].numel()
    ]
    works += [
        dist.isend(values[rank], world[rank], group=own, tag=TAG)
        for rank in others
        if values[rank].numel()
    ]
    assert None not in works, "this rank is not in the group"
    return Works(cast(list[Work], works), group.limit)


def _limited(work: Work, tensor: Tensor, group: Group) -> Work:
    """Return ``work``; over gloo wrap it with the time limit of its group."""
    if group.backends.get(tensor.device.type) != "gloo":
        return work
    return Works([work], group.limit)
