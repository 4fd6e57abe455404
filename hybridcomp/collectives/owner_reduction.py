"""Reduce a bucket whose ranges have owner ranks, as in ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import QuantizedResidual, clear
from hybridcomp.collectives.first_hop import FirstHop
from hybridcomp.collectives.hierarchical.intra_node import (
    keep_sum,
    node_sum,
    ranges_of_nodes,
    scatter_intra_node,
)
from hybridcomp.collectives.owner_exchange import send_sums
from hybridcomp.collectives.owner_plan import plan_of
from hybridcomp.collectives.owner_rounds import BucketPlan, ScatterRound, plan_bucket
from hybridcomp.collectives.wire.chunking import OwnedRange, chunk_ranges
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest, check_residual, check_values
from hybridcomp.collectives.wire.exchanges import accumulator, decode_fp32_all, exchange
from hybridcomp.collectives.wire.group import Group, Reduction, Transfer
from hybridcomp.collectives.wire.handle import Meter, Pending, Steps, overlapped
from hybridcomp.collectives.wire.steps import add_alone, given


def reduce_to_owners(tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction) -> list[Tensor]:
    """Sum ``tensor`` over a group; only the owners of a range get its sum.

    ``plan_of`` chooses a direct or a balanced plan. With e1 the codec's bound for one rank's values
    and e2 its bound for the sum, the error of an element is at most ``W * e1`` (direct) or
    ``(W - 1) * e1 + e2`` (balanced); in two levels nodes take the place of ranks. All owners of a
    range get the same bits.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16, not modified.
        ranges: cover ``tensor`` in order, each with at least one rank; the same on all ranks.
        how: codec, group, meter and residuals; ``owner_residual`` is used if ``owner_hops`` is 2.

    Returns the fp32 sum of every range that this rank owns, in the order of ``ranges``; the
    tensors may be views of one buffer that belongs to the caller.
    Raises CodecError on other tensors, or when the ranges do not cover the tensor.
    """
    if how.group.levels is not None:
        return Pending(_in_two_levels(tensor.detach(), ranges, how), how.meter, False).wait()
    steps, sums = _flat(tensor.detach(), ranges, how)
    Pending(steps, how.meter, False)
    return sums


def keep_to_owners(tensor: Tensor, how: Transfer, total: Tensor) -> None:
    """Sum ``tensor`` over the node and add this rank's slice of the sum to ``total``, fp32.

    A later ``reduce_to_owners`` of a tensor with the same cuts sends ``total``, if the caller
    passes it as ``Reduction.kept``.
    """
    edges = chunk_ranges(tensor.numel(), how.group.width)
    lengths = [stop - start for start, stop in edges]
    Pending(keep_sum(tensor.detach(), lengths, how, total), how.meter, False).wait()


def owner_hops(ranges: Sequence[OwnedRange], numel: int, group: Group) -> int:
    """Return how often ``reduce_to_owners`` of these ranges quantizes a value: 1 or 2."""
    key = ("hops", id(ranges), numel)
    known: tuple[Sequence[OwnedRange], int] | None = group.plans.get(key)
    if known is not None:
        return known[1]
    held = ranges
    if group.levels is not None:
        within = chunk_ranges(numel, group.width)[group.local]
        ranges = ranges_of_nodes(ranges, within, group.levels)
    hops = 2 if plan_of(tuple(ranges), group.encoders).kind == "balanced" else 1
    if isinstance(held, tuple):
        group.keep(key, (held, hops))
    return hops


def _in_two_levels(
    tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction
) -> Steps[list[Tensor]]:
    """1 sum this rank's slice over the node, 2 reduce to owner nodes, 3 scatter to the owners."""
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
) -> tuple[Steps[Any], list[Tensor]]:
    """Return the steps on one level, as planned, and the sums into which these steps write."""
    check_values("tensor", tensor)
    check_residual("residual", how.residual, tensor.numel())
    plan = _planned(tensor, ranges, how)
    if how.probe is not None and how.group.size > 1:
        how.probe(tensor, how.cuts, how.residual)
    sums = tensor.new_empty(plan.mine.numel, dtype=torch.float32)
    results = [sums[low:high] for low, high in plan.mine.results]
    if plan.first is None:
        _alone(tensor, plan, sums, how)
        return given(None), results
    how.meter.used.update(plan.specs)
    if plan.chunk is not None:
        return _balanced(tensor, plan, plan.first, sums, how), results
    left = None if how.residual is None else [how.residual]
    return plan.first.sum([tensor], left, sums, how), results


def _planned(tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction) -> BucketPlan:
    """Return the cached plan for buckets like this one, making it for the first."""
    cuts, same = tuple(how.cuts), id(ranges) if isinstance(ranges, tuple) else tuple(ranges)
    left = how.residual
    of_residual = (isinstance(left, QuantizedResidual) and left.in_blocks, type(left))
    kinds = (tensor.numel(), tensor.dtype, tensor.device, *of_residual, how.flush)
    key = ("owners", id(how.codec), same, cuts, *kinds)
    found: BucketPlan | None = how.group.plans.get(key)
    if found is None:
        found = plan_bucket(tensor, ranges, how)
        rounds = 0 if found.first is None else len(found.first.rounds) + len(found.scatters)
        weight = how.group.size * rounds
        how.group.keep(key, found, 1 + weight + len(ranges) + len(cuts))
    return found


def _alone(tensor: Tensor, plan: BucketPlan, sums: Tensor, how: Reduction) -> None:
    """Copy the runs into ``sums`` and add the residual, in a group of one rank."""
    for run in plan.owners.runs:
        here, out = slice(run.start, run.stop), plan.mine.part(sums, run.start, run.stop)
        out.copy_(tensor[here])
        if how.residual is not None:
            add_alone(how.residual[here], out)


def _balanced(
    tensor: Tensor, plan: BucketPlan, first: FirstHop, sums: Tensor, how: Reduction
) -> Steps[None]:
    """1 sum this rank's chunk of the even split, 2 send the sums to their owners (``_send_on``)."""
    group, meter, kept, alone = how.group, how.meter, how.owner_residual, plan.alone
    assert plan.chunk is not None
    here = tensor[plan.chunk.start : plan.chunk.stop]
    check_residual("owner_residual", kept, here.numel())
    # 1
    place = None if alone is None else sums[alone : alone + here.numel()]
    buffer, total, begin = accumulator(kept, place, here)
    residuals = None if how.residual is None else [how.residual]
    yield from first.sum([tensor], residuals, total, how, begin)
    # 2
    begun = kept is not None
    if plan.table is not None:
        yield from send_sums(total, sums, plan.table, how, begun)
    else:
        yield from overlapped(
            [_send_on(each, total, sums, group, meter, begun) for each in plan.scatters]
        )
    if alone is not None and kept is not None:
        clear(kept)
    elif isinstance(kept, QuantizedResidual):
        kept.pack(total)
    POOL.give(buffer)


def _send_on(
    plan: ScatterRound, total: Tensor, sums: Tensor, group: Group, meter: Meter, feedback: bool
) -> Steps[None]:
    """1 send this rank's sums to their owners, 2 decode the sums that this rank owns.

    With ``feedback`` the sums in ``total`` become the residual of this quantization.
    """
    # 1
    values = [total[low:high] for low, high in plan.sent]
    jobs = [EncodeRequest(one, one if feedback else None) for one in values]
    payloads = yield from exchange(plan.exchange, jobs, group, meter)
    # 2
    start = meter.clock.begin()
    arrived = [*chain(*payloads.received), *[payloads.encoded[job] for job, _ in plan.again]]
    places = [sums[low:high] for low, high in (*plan.arriving, *[at for _, at in plan.again])]
    decode_fp32_all(plan.exchange, arrived, places)
    for (low, high), (place, end) in plan.stays:
        sums[place:end].copy_(total[low:high])
        if feedback:
            total[low:high].zero_()
    meter.clock.end(meter, "codec", start)
    POOL.give(*payloads.buffers)
