"""Reduce a bucket whose ranges have owner ranks, as in ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual
from hybridcomp.collectives.fused import fits, fused_reduce_scatter
from hybridcomp.collectives.hierarchical.intra_node import (
    node_sum,
    ranges_of_nodes,
    scatter_intra_node,
)
from hybridcomp.collectives.owner_exchange import exchange_of, send_sums, sum_at_owners
from hybridcomp.collectives.owner_plan import (
    OwnedPart,
    OwnedSums,
    OwnerPlan,
    find_plan,
    part_rounds,
    range_rounds,
)
from hybridcomp.collectives.reduce_parts import ReducedPart, sum_parts
from hybridcomp.collectives.wire import (
    POOL,
    EncodeRequest,
    Group,
    OwnedRange,
    Pending,
    Reduction,
    Steps,
    Transfer,
    add_alone,
    check_residual,
    check_values,
    chunk_ranges,
    decode_all,
    decode_fp32,
    exchange,
    given,
    overlapped,
    round_count,
    sent_dtype,
)
from hybridcomp.errors import CodecError


def reduce_to_owners(tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction) -> list[Tensor]:
    """Sum ``tensor`` over a group; only the owners of a range get its sum.

    ``plan_of`` chooses the plan. The error of an element is at most ``W * e1`` (direct) or
    ``(W - 1) * e1 + e2`` (balanced), in two levels with nodes for ranks. Owners of one range get
    the same bits.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16, not modified.
        ranges: cover ``tensor`` in order, each with at least one rank; the same on all ranks.
        how: ``owner_hops`` says whether its owner's residual is used.

    Returns the fp32 sum of every range that this rank owns, in the order of ``ranges``; the
    tensors may be views of one buffer that belongs to the caller.
    Raises CodecError on other tensors, or when the ranges do not cover the tensor.
    """
    if how.group.levels is not None:
        return Pending(_in_two_levels(tensor.detach(), ranges, how), how.meter, False).wait()
    steps, sums = _flat(tensor.detach(), ranges, how)
    Pending(steps, how.meter, False)
    return sums


def owner_hops(ranges: Sequence[OwnedRange], numel: int, group: Group) -> int:
    """Return how often ``reduce_to_owners`` of these ranges quantizes a value: 1 or 2."""
    if group.levels is not None:
        within = chunk_ranges(numel, group.width)[group.local]
        ranges = ranges_of_nodes(ranges, within, group.levels)
    return 2 if find_plan(ranges, group.encoders).kind == "balanced" else 1


def _in_two_levels(
    tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction
) -> Steps[list[Tensor]]:
    """1 sum this rank's stretch over the node, 2 reduce to the owners' nodes, 3 then to owners."""
    levels = how.group.levels
    assert levels is not None
    codec = how.codec.for_presummed(levels.width)
    edges = chunk_ranges(tensor.numel(), levels.width)
    # 1
    lengths = [stop - start for start, stop in edges]
    buffer, work = yield from node_sum(tensor, lengths, codec, how)
    # 2
    needed = ranges_of_nodes(ranges, edges[levels.local], levels)
    steps, sums = _flat(work, needed, how.between_nodes(codec))
    yield from steps
    # 3
    results = yield from scatter_intra_node(ranges, tensor, sums, levels, how.meter)
    POOL.give(buffer)
    return results


def _flat(
    tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction
) -> tuple[Steps[None], list[Tensor]]:
    """Return the steps on one level, direct or balanced as the plan says, and what they fill in."""
    me, world_size = how.group.rank, how.group.size
    check_values("tensor", tensor)
    check_residual("residual", how.residual, tensor.numel())
    plan = find_plan(ranges, world_size)
    if plan.numel != tensor.numel():
        raise CodecError(f"ranges: expected to cover {tensor.numel()} elements, found {plan.numel}")
    if how.probe is not None and world_size > 1:
        how.probe(tensor, how.cuts, how.residual)
    mine = plan.sums_of(me)
    sums = _BucketSums(tensor.new_empty(mine.numel, dtype=torch.float32), mine)
    results = [sums.flat[low:high] for low, high in mine.results]
    if world_size == 1 or not plan.runs:
        _alone(tensor, plan, sums, how)
        return given(None), results
    return (_direct if plan.kind == "direct" else _balanced)(tensor, plan, sums, how), results


def _alone(tensor: Tensor, plan: OwnerPlan, sums: _BucketSums, how: Reduction) -> None:
    """Copy the runs into the sums of a group of one rank, and add the residual."""
    for run in plan.runs:
        here, out = slice(run.start, run.stop), sums.part(run.start, run.stop)
        out.copy_(tensor[here])
        if how.residual is not None:
            add_alone(how.residual[here], out)


@dataclass(frozen=True)
class _BucketSums:
    """The sums that this rank owns, in one fp32 tensor."""

    flat: Tensor
    mine: OwnedSums

    def part(self, start: int, stop: int) -> Tensor:
        return self.mine.part(self.flat, start, stop)


def _direct(tensor: Tensor, plan: OwnerPlan, sums: _BucketSums, how: Reduction) -> Steps[None]:
    """Send every range to its owners, who sum it, in rounds that overlap."""
    me, group, device = how.group.rank, how.group, tensor.device
    (codec,) = how.codec.split_error_budget(1, group.size, exact=int(plan.sole))
    how.meter.use(codec.spec)
    kernel = codec.planned(device) if plan.sole else None
    if kernel is not None:
        exchange = exchange_of(plan, kernel, codec, tensor, how)
        return sum_at_owners(tensor, sums.flat, exchange, kernel, how)
    hop = Transfer(codec, group, how.meter, flush=how.flush)
    count = round_count(plan.longest[0], (codec,), device, group)
    return overlapped(
        sum_parts(
            [
                ReducedPart(
                    *_of(tensor, owned, how.residual),
                    sums.part(owned.start, owned.stop) if me in owned.ranks else None,
                )
                for owned in share
            ],
            hop,
        )
        for share in range_rounds(plan.runs, tuple(how.cuts), count)
    )


def _balanced(tensor: Tensor, plan: OwnerPlan, sums: _BucketSums, how: Reduction) -> Steps[None]:
    """1 sum this rank's chunk of the even split, 2 send the sums to their owners (``_send_on``).

    A bounded codec must encode the same stretches in both, so both are cut where owners change.
    """
    me, group, device = how.group.rank, how.group, tensor.device
    first, second = how.codec.split_error_budget(2, group.size, exact=1)
    how.meter.use(first.spec, second.spec)
    cuts = tuple(how.cuts)
    if how.codec.bounded:
        cuts = tuple(sorted({*cuts, *(run.start for run in plan.runs)}))
    start, stop = plan.even[me].start, plan.even[me].stop
    check_residual("owner_residual", how.owner_residual, stop - start)
    # 1
    kept = how.owner_residual
    if isinstance(kept, Tensor):
        buffer, total = None, kept
    else:
        buffer, total = POOL.take_fp32(stop - start, device)
        if kept is not None:
            kept.unpack(total)
    fused = None if cuts else first.fused(device)
    if fused is not None and fits(how.residual):
        only = Reduction(first, group, how.meter, residual=how.residual)
        begun = how.owner_residual is not None
        yield from fused_reduce_scatter(tensor, plan.lengths[0], total, fused, only, begun)
    else:
        hop = Transfer(first, group, how.meter, flush=how.flush)
        count = round_count(plan.longest[1], (first,), device, group)
        yield from overlapped(
            sum_parts([_even_part(tensor, owned, total, start, how) for owned in share], hop)
            for share in range_rounds(plan.even, cuts, count)
        )
    # 2
    hop = Transfer(second, group, how.meter)
    kernel = second.planned(device) if plan.sole and not cuts else None
    if kernel is not None:
        exchange = exchange_of(plan, kernel, second, total, hop)
        feedback = how.owner_residual is not None
        yield from send_sums(total, sums.flat, exchange, kernel, hop, feedback)
    else:
        yield from overlapped(_scatter_rounds(plan, total, sums, cuts, hop, how, tensor.dtype))
    if isinstance(kept, QuantizedResidual):
        kept.pack(total)
    POOL.give(buffer)


def _scatter_rounds(
    plan: OwnerPlan, total: Tensor, sums: _BucketSums, cuts: tuple[int, ...], hop: Transfer,
    how: Reduction, dtype: torch.dtype,
) -> list[Steps[None]]:  # fmt: skip
    """Return the rounds in which this rank's chunk ``total`` of the sums goes to the owners.

    ``dtype``: of the values that were summed.
    """
    me, group, start = hop.group.rank, hop.group, plan.even[hop.group.rank].start
    count = round_count(plan.longest[2], (hop.codec,), total.device, group)
    sent = sent_dtype(hop.codec, dtype, wide=True, flush=how.flush)
    feedback = how.owner_residual is not None
    scatter = _Scatter(sums, hop, sent, total.device, feedback)
    messages = []
    for share in part_rounds(plan.runs, cuts, group.size, count):
        mine = {p: total[p.start - start :][: p.numel] for p in share if p.source == me}
        messages.append(_send_on(share, mine, scatter))
    return messages


def _of(
    tensor: Tensor, owned: OwnedRange, residual: Residual | None
) -> tuple[Tensor, tuple[int, ...], Residual | None]:
    """Return the first arguments of a ``ReducedPart``: values, owners and residual of ``owned``."""
    here = slice(owned.start, owned.stop)
    return tensor[here], owned.ranks, None if residual is None else residual[here]


def _even_part(
    tensor: Tensor, owned: OwnedRange, total: Tensor, start: int, how: Reduction
) -> ReducedPart:
    """Return a part of the even split; this rank's is summed in ``total``, which has ``start``."""
    part = ReducedPart(*_of(tensor, owned, how.residual))
    if part.owners == (how.group.rank,):
        part.out = total[owned.start - start : owned.stop - start]
        part.fresh = how.owner_residual is None
    return part


@dataclass(frozen=True)
class _Scatter:
    """Second hop of the balanced plan: sums go from the ranks that made them to the owners.

    With ``feedback`` the memory of a sum becomes the residual of this quantization.
    """

    sums: _BucketSums
    via: Transfer
    dtype: torch.dtype  # of the encoded values
    device: torch.device
    feedback: bool


def _send_on(
    parts: Sequence[OwnedPart], mine: dict[OwnedPart, Tensor], scatter: _Scatter
) -> Steps[None]:
    """1 send this rank's sums (``mine``) to their owners, 2 decode the sums that this rank owns."""
    via, feedback, dtype = scatter.via, scatter.feedback, scatter.dtype
    me = via.group.rank
    # 1
    jobs = {p: EncodeRequest(v, v if feedback else None) for p, v in mine.items() if not p.stays}
    outgoing: list[list[EncodeRequest]] = [[] for _ in range(via.group.size)]
    incoming: list[list[OwnedPart]] = [[] for _ in range(via.group.size)]
    for part, job in jobs.items():
        for rank in part.ranks:
            if rank != me:
                outgoing[rank].append(job)
    for part in parts:
        if part.source != me and me in part.ranks:
            incoming[part.source].append(part)
    numels = [[part.numel for part in row] for row in incoming]
    payloads = yield from exchange(outgoing, numels, dtype, scatter.device, via)
    # 2
    arrived = [*zip(chain(*incoming), chain(*payloads.received), strict=True)]
    arrived += [(p, payloads.encoded[job]) for p, job in jobs.items() if me in p.ranks]
    with via.meter.coding():
        places = [scatter.sums.part(part.start, part.stop) for part, _ in arrived]
        if len(arrived) > 1 and via.codec.each(scatter.device) is not None:
            decode_all(via.codec, [payload for _, payload in arrived], places)
        else:
            for place, (_, payload) in zip(places, arrived, strict=True):
                decode_fp32(via.codec, payload, place, dtype)
        for part, values in mine.items():
            if part.stays:
                scatter.sums.part(part.start, part.stop).copy_(values)
                if feedback:
                    values.zero_()
    payloads.release()
