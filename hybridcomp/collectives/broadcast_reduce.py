"""broadcast and reduce, with one quantization each, and a native version of each.

In a broadcast the root encodes once and decodes its payload as well, so that all ranks continue
with the same bits. In a reduction the root adds its values unquantized.

hybridcomp's own layers have no upstream code that sends their messages natively, so they call
``broadcast_native`` and ``reduce_native``. ``reduce_native`` sums in the order of ``reduce``, so a
lossless codec changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.first_hop import FirstHop, plan_first_hop
from hybridcomp.collectives.owner_plan import direct_plan
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.chunking import OwnedRange, Range
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest, check_values
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, plan_exchange
from hybridcomp.collectives.wire.exchanges import exchange
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.handle import Handle, Meter, Steps, overlapped
from hybridcomp.collectives.wire.message_rounds import rounds
from hybridcomp.errors import CodecError


def broadcast(
    values: Tensor | None, out: Tensor, root: int, via: Transfer, async_op: bool = False
) -> Handle:
    """Encode ``values`` on group rank ``root`` and decode them into ``out`` on all ranks.

    Args:
        values: 1-D contiguous fp32/bf16/fp16 on the root, None elsewhere. Must not change before
            ``wait()``.
        out: of the length and dtype of ``values``, without overlap; not to be touched before
            ``wait()``.
        root: group rank.
        via: codec, group and meter.
        async_op: as for ``all_reduce``.

    Raises CodecError on other tensors.
    """
    out = out.detach()
    check_values("out", out)
    if (values is None) is (via.group.rank == root):
        raise CodecError(f"values: expected on the root {root} and only there")
    if values is not None:
        values = values.detach()
        check_values("values", values)
        if values.dtype != out.dtype or values.numel() != out.numel():
            raise CodecError(
                f"out: expected {values.numel()} elements of {values.dtype}, found "
                f"{out.numel()} of {out.dtype}"
            )
    return Handle(_broadcast(values, out, root, via), via.meter, async_op)


def _broadcast(values: Tensor | None, out: Tensor, root: int, via: Transfer) -> Steps[None]:
    """Broadcast in overlapping rounds."""
    group, numel = via.group, out.numel()
    if group.size == 1 and values is not None:
        out.copy_(values)
    if group.size == 1 or not numel:
        return
    key = ("broadcast", id(via.codec), root, numel, out.dtype, out.device)
    plan: _BroadcastPlan | None = group.plans.get(key)
    if plan is None:
        (codec,) = via.codec.split_error_budget(1, 1, result=out.dtype)
        cut = rounds([[(0, numel)]], (codec,), out.device, group)
        each = [_plan_broadcast(row, codec, out, root, group) for (row,) in cut if row]
        plan = group.keep(key, _BroadcastPlan(via.codec, codec, each), group.size * len(each))
    via.meter.used[plan.codec.spec] = None
    yield from overlapped([_broadcast_round(each, values, out, root, via) for each in plan.rounds])


@dataclass(frozen=True, eq=False)
class _BroadcastRound:
    """Elements ``[start, stop)`` of a broadcast, and their exchange."""

    start: int
    stop: int
    exchange: ExchangePlan


@dataclass(frozen=True, eq=False)
class _BroadcastPlan:
    """Rounds of equal messages; ``held``: their codec, whose ``id`` is in the cache key."""

    held: Codec
    codec: Codec  # codec that encodes
    rounds: list[_BroadcastRound]


def _plan_broadcast(
    row: Sequence[Range], codec: Codec, out: Tensor, root: int, group: Group
) -> _BroadcastRound:
    (start, _), (_, stop) = row[0], row[-1]
    sends, ranks = group.rank == root, range(group.size)
    to = [[0] if sends and rank != root else [] for rank in ranks]
    come = [[stop - start] if not sends and rank == root else [] for rank in ranks]
    jobs = [stop - start] if sends else []
    plan = plan_exchange(to, jobs, come, codec, out.dtype, out.device, group)
    return _BroadcastRound(start, stop, plan)


def _broadcast_round(
    plan: _BroadcastRound, values: Tensor | None, out: Tensor, root: int, via: Transfer
) -> Steps[None]:
    """1 the root encodes and sends to the others, 2 all ranks decode."""
    here = slice(plan.start, plan.stop)
    # 1
    jobs = [] if values is None else [EncodeRequest(values[here])]
    payloads = yield from exchange(plan.exchange, jobs, via.group, via.meter)
    # 2
    payload = payloads.encoded[0] if jobs else payloads.received[root][0]
    with via.meter.coding():
        plan.exchange.codec.decode(payload, out[here])
    POOL.give(*payloads.buffers)


def reduce(
    values: Tensor, out: Tensor | None, root: int, via: Transfer, async_op: bool = False
) -> Handle:
    """Sum ``values`` of all ranks in fp32 and rank order into ``out`` of group rank ``root``.

    With e the codec's bound for one rank's values, the error is at most ``(W - 1) * e``: the root
    adds its values exactly.

    Args:
        values: 1-D contiguous fp32/bf16/fp16. Must not change before ``wait()``.
        out: fp32, as long, on the root; None elsewhere. Not to be touched before ``wait()``.
        root: group rank.
        via: codec, group and meter.
        async_op: as for ``all_reduce``.

    Raises CodecError on other tensors.
    """
    values = values.detach()
    check_values("values", values)
    _check_sum(values, out, root, via.group, torch.float32)
    return Handle(_reduce(values, out, root, via), via.meter, async_op)


def _reduce(values: Tensor, out: Tensor | None, root: int, via: Transfer) -> Steps[None]:
    """Reduce in overlapping rounds: all ranks send to the root, which sums."""
    group, numel = via.group, values.numel()
    if group.size == 1 and out is not None:
        out.copy_(values)
    if group.size == 1 or not numel:
        return
    key = ("reduce", id(via.codec), root, numel, values.dtype, values.device)
    plan: FirstHop | None = group.plans.get(key)
    if plan is None:
        (codec,) = via.codec.split_error_budget(1, group.size, exact=1)
        owners, only = (
            direct_plan((OwnedRange(0, numel, (root,)),)),
            Transfer(codec, group, via.meter),
        )
        plan = plan_first_hop(owners, [codec], values, only, False, kernels=False)
        group.keep(key, replace(plan, held=via.codec), group.size * len(plan.rounds))
    via.meter.used[plan.codec.spec] = None
    total = values if out is None else out  # other ranks sum nothing
    yield from plan.sum([values], None, total, via)


def _check_sum(
    values: Tensor, out: Tensor | None, root: int, group: Group, dtype: torch.dtype
) -> None:
    """Raise CodecError unless ``out`` is on the root only, of the right dtype and length."""
    if (out is not None) is not (group.rank == root):
        raise CodecError(f"out: expected on the root {root} and only there")
    if out is not None and (out.dtype != dtype or out.numel() != values.numel()):
        raise CodecError(
            f"out: expected {values.numel()} elements of {dtype}, found {out.numel()} of "
            f"{out.dtype}"
        )


def broadcast_native(
    values: Tensor, root: int, group: Group, meter: Meter, async_op: bool = False
) -> Handle:
    """Broadcast ``values`` (1-D, contiguous) of group rank ``root`` unencoded to all ranks."""
    return Handle(_broadcast_native(values.detach(), root, group, meter), meter, async_op)


def _broadcast_native(values: Tensor, root: int, group: Group, meter: Meter) -> Steps[None]:
    if group.size > 1:
        yield transport.broadcast(values, root, group, meter)


def reduce_native(
    values: Tensor,
    out: Tensor | None,
    root: int,
    group: Group,
    meter: Meter,
    async_op: bool = False,
) -> Handle:
    """Sum ``values`` of all ranks, unencoded, in rank order into ``out`` of ``root``.

    ``values``: 1-D, contiguous, any floating dtype. ``out``: fp32, or fp64 for fp64 ``values``.
    Raises CodecError on another ``out``.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    _check_sum(values, out, root, group, wide)
    return Handle(_reduce_native(values.detach(), out, root, group, meter), meter, async_op)


def _reduce_native(
    values: Tensor, out: Tensor | None, root: int, group: Group, meter: Meter
) -> Steps[None]:
    """1 all ranks send to the root, 2 the root adds in rank order."""
    if group.size == 1 and out is not None:
        out.copy_(values)
    if group.size == 1 or not values.numel():
        return
    # 1
    none, numel = [0] * group.size, values.numel()
    if out is None:
        gives = [numel if rank == root else 0 for rank in range(group.size)]
        yield transport.all_to_all(values.new_empty(0), values, none, gives, group, meter)
        return
    takes = [0 if rank == root else numel for rank in range(group.size)]
    buffer = POOL.take(sum(takes) * values.itemsize, values.device)
    room = buffer[: sum(takes) * values.itemsize].view(values.dtype)
    yield transport.all_to_all(room, values[:0], takes, none, group, meter)
    # 2
    others = iter(torch.split(room, numel))
    rows = [values if rank == root else next(others) for rank in range(group.size)]
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    POOL.give(buffer)
