"""all_gather and all_to_all of encoded values, with one quantization; gathers of raw words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from hybridcomp.collectives.fused import fused_all_gather, fused_all_to_all
from hybridcomp.collectives.fused_parts import gather_parts, parts_to_all
from hybridcomp.collectives.hierarchical.intra_node import place_columns
from hybridcomp.collectives.move_plans import (
    AllGatherPlan,
    AllToAllPlan,
    plan_all_gather,
    plan_all_to_all,
)
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.chunking import Range
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest, check_values
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan
from hybridcomp.collectives.wire.exchanges import exchange
from hybridcomp.collectives.wire.gathers import (
    GatherPlan,
    decode_all,
    encode_all,
    gather,
    gather_values,
)
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.handle import Handle, Meter, Steps, overlapped
from hybridcomp.collectives.wire.splits import Splits
from hybridcomp.collectives.wire.steps import given, transfer
from hybridcomp.errors import CodecError


def all_gather(shard: Tensor, out: Tensor, via: Transfer, async_op: bool = False) -> Handle:
    """Gather the shards of all ranks into ``out``, by group rank; the same bits on all ranks.

    This rank also decodes its own shard from the payload that it sends; with a lossless codec it
    copies the shard instead. In two levels ``wait()`` posts a second message, so all ranks must
    wait for their handles in the same order.

    Args:
        shard: 1-D contiguous fp32/bf16/fp16, equally long on all ranks; may be a view of its
            place in ``out``. Read before the call returns.
        out: same dtype, ``group.size * shard.numel()`` elements; not to be touched before
            ``wait()``. With a codec ``against`` earlier values it holds the other ranks' earlier
            values.
        via: codec, group, meter and cuts. Cuts are positions in ``shard``, equal on all ranks; the
            slices between them are encoded like separate messages.
        async_op: as for ``all_reduce``.

    Raises CodecError on other tensors.
    """
    shard, out = shard.detach(), out.detach()
    check_values("shard", shard)
    check_values("out", out)
    expected = via.group.size * shard.numel()
    if out.dtype != shard.dtype or out.numel() != expected:
        raise CodecError(
            f"out: expected {expected} elements of {shard.dtype}, found "
            f"{out.numel()} of {out.dtype}"
        )
    whole = via.group.levels is None
    steps = _all_gather(shard, out, via) if whole else _in_two_levels(shard, out, via)
    return Handle(steps, via.meter, async_op)


def _in_two_levels(shard: Tensor, out: Tensor, via: Transfer) -> Steps[None]:
    """1 gather this rank's grid column between nodes, encoded, 2 gather the columns in the node.

    With N nodes of L ranks, a ring over all ranks carries every payload into N nodes. These steps
    carry it into N - 1 nodes, which saves 1/N of the bytes between nodes, and every rank decodes N
    shards instead of N * L. In more than two levels a payload crosses to a site once and is then
    forwarded, still encoded, to the site's other nodes.
    """
    levels, numel = via.group.levels, shard.numel()
    assert levels is not None
    if not numel:
        return
    # 1
    far = levels.gathered
    column = shard.new_empty(far.size * numel)
    if via.codec.references:  # decoding the column needs its earlier values
        first = levels.stages[0].rank * far.size
        held = levels.by_column(out.device)[first : first + far.size]
        torch.index_select(out.view(-1, numel), 0, held, out=column.view(-1, numel))
    yield from _all_gather(shard, column, Transfer(via.codec, far, via.meter, via.cuts))
    # 2
    yield from place_columns(column, out, levels, via.meter)


def _all_gather(shard: Tensor, out: Tensor, via: Transfer) -> Steps[None]:
    """Gather on one level: in two launches, or in overlapping rounds.

    All values are encoded before the first wait.
    """
    group, numel = via.group, shard.numel()
    if group.size == 1 or numel == 0:
        out.copy_(shard)
        return given(None)
    plan = _planned(shard, via)
    via.meter.used[plan.codec.spec] = None
    only = Transfer(plan.codec, group, via.meter, via.cuts)
    if plan.fused is not None:
        return fused_all_gather(shard, out, plan.fused, only)
    if plan.parts is not None:
        return gather_parts(shard, out, plan.parts, only)
    places = torch.split(out, numel)
    return overlapped([_gather_round(shard, places, each, only) for each in plan.rounds])


def _planned(shard: Tensor, via: Transfer) -> AllGatherPlan:
    """Return the cached plan for messages like this one, making it for the first.

    A codec ``against`` earlier values belongs to a single message, so its plan is not cached.
    """
    cuts, group = tuple(via.cuts), via.group
    key = ("all_gather", id(via.codec), shard.numel(), shard.dtype, shard.device, cuts)
    found: AllGatherPlan | None = group.plans.get(key)
    if found is None:
        found = plan_all_gather(shard, via)
        if not via.codec.references:
            group.keep(key, found, 1 + group.size * len(found.rounds) + len(cuts))
    return found


def _gather_round(
    shard: Tensor, places: Sequence[Tensor], each: tuple[list[Range], GatherPlan], via: Transfer
) -> Steps[None]:
    """Gather the slices of one round into ``places``, by rank (``gather_values``)."""
    (row, plan), me, ranks = each, via.group.rank, list(range(len(places)))
    here: list[Tensor] = []
    if via.codec.lossless:
        ranks.remove(me)
        if places[me].data_ptr() != shard.data_ptr():
            here = [places[me][start:stop] for start, stop in row]
    out = [places[rank][start:stop] for rank in ranks for start, stop in row]
    if row == [(0, shard.numel())]:
        out = [places[rank] for rank in ranks]
    values = [shard[start:stop] for start, stop in row]
    return gather_values(plan, values, out, via, row, ranks, here)


def gather_payloads(
    values: Tensor, via: Transfer
) -> tuple[list[tuple[Range, list[Tensor]]], list[Tensor]]:
    """Encode ``values`` without cuts and gather the payloads of all ranks on one level; blocking.

    ``values``: as ``shard`` of ``all_gather``. Returns ``(rounds, buffers)``. A round is the range
    of ``values`` that it sends and the payloads of this range, 1-D uint8, by group rank. The caller
    gives the payloads' buffers back to ``POOL``.
    """
    check_values("values", values)
    plan = plan_all_gather(values, via)
    via.meter.used[plan.codec.spec] = None
    found: list[tuple[Range, list[Tensor]]] = []
    buffers: list[Tensor] = []

    def steps(row: Sequence[Range], each: GatherPlan) -> Steps[None]:
        (stretch,) = row
        with via.meter.coding():
            own = encode_all(each, [values[slice(*stretch)]], row)
        payloads, buffer = yield from gather(own, each, via.group, via.meter)
        POOL.give(own.buffer)
        buffers.append(buffer)
        found.append((stretch, [one for (one,) in payloads]))

    Handle(overlapped([steps(*each) for each in plan.rounds]), via.meter, async_op=False)
    return found, buffers


def gather_words(words: Tensor, group: Group, meter: Meter) -> list[list[int]]:
    """Gather the int64 ``words`` (1-D, equally long on all ranks), by group rank; blocking."""
    out = words.new_empty(group.size * words.numel())
    transfer(lambda: transport.all_gather(out, words, group, meter), meter)
    rows: list[list[int]] = out.view(group.size, -1).tolist()
    return rows


def all_to_all(
    out: Tensor,
    values: Tensor,
    via: Transfer,
    out_splits: Sequence[int] | Splits | None = None,
    in_splits: Sequence[int] | Splits | None = None,
    async_op: bool = False,
) -> Handle:
    """Send part r of ``values`` to group rank r; fill ``out`` with the parts of all ranks.

    The part that stays on this rank is copied, not quantized.

    Args:
        out: 1-D contiguous fp32/bf16/fp16, apart from ``values``; not to be touched before
            ``wait()``.
        values: the same dtype. Not modified. Must not change before ``wait()``.
        via: codec, group and meter.
        out_splits, in_splits: elements received from and sent to each group rank; None splits
            evenly. A list object seen before, or ``Splits``, is not read again.
        async_op: as for ``all_reduce``.

    Raises CodecError on other tensors or splits that do not add up.
    """
    out, values = out.detach(), values.detach()
    check_values("out", out)
    check_values("values", values)
    if out.dtype != values.dtype:
        raise CodecError(f"out: expected {values.dtype} as in values, found {out.dtype}")
    me, world_size = via.group.rank, via.group.size
    takes = _splits("out_splits", out_splits, out.numel(), world_size)
    gives = _splits("in_splits", in_splits, values.numel(), world_size)
    if takes[me] != gives[me]:
        raise CodecError(f"splits of rank {me} to itself: sends {gives[me]}, takes {takes[me]}")
    return Handle(_all_to_all(out, values, takes, gives, via), via.meter, async_op)


def _splits(
    name: str, splits: Sequence[int] | Splits | None, numel: int, world_size: int
) -> Splits:
    if splits is None:
        if numel % world_size:
            raise CodecError(
                f"{name}: {numel} elements cannot be cut evenly for {world_size} ranks"
            )
        return Splits.even(numel // world_size, world_size)
    found = Splits.of(splits)
    if len(found) != world_size or found.least < 0 or found.total != numel:
        raise CodecError(
            f"{name}: expected {world_size} lengths that add up to {numel}, found {found.numels}"
        )
    return found


def _all_to_all(
    out: Tensor, values: Tensor, takes: Splits, gives: Splits, via: Transfer
) -> Steps[None]:
    """Exchange in two launches if the codec has kernels for it; if not, encode part by part."""
    if len(gives) == 1:
        out.copy_(values)
        return given(None)
    group, dtype, device = via.group, values.dtype, values.device
    key = ("all_to_all", id(via.codec), id(takes), id(gives), dtype, device)
    plan: AllToAllPlan | None = group.plans.get(key)
    if plan is None:
        plan = plan_all_to_all(takes, gives, dtype, device, via)
        group.keep(key, plan, 1 if plan.fused is not None else group.size)
    only = Transfer(plan.codec, group, via.meter)
    via.meter.used[plan.codec.spec] = None
    if plan.fused is not None:
        return fused_all_to_all(out, values, plan.fused, only)
    if plan.parts is not None:
        return parts_to_all(out, values, takes, gives, plan.parts, only)
    assert plan.exchange is not None
    places, sources = torch.split(out, takes.numels), torch.split(values, gives.numels)
    return _parts_to_all(places, sources, plan.exchange, only)


def _parts_to_all(
    places: Sequence[Tensor], sources: Sequence[Tensor], plan: ExchangePlan, via: Transfer
) -> Steps[None]:
    """1 encode and exchange, 2 decode; by group rank."""
    me = via.group.rank
    places[me].copy_(sources[me])
    # 1
    jobs = [EncodeRequest(s) for s, row in zip(sources, plan.rows, strict=True) if row]
    payloads = yield from exchange(plan, jobs, via.group, via.meter)
    # 2
    with via.meter.coding():
        others = [place for place, row in zip(places, payloads.received, strict=True) if row]
        decode_all(plan, list(chain(*payloads.received)), others)
    POOL.give(*payloads.buffers)
