"""all_reduce of encoded values, in two hops, or in one between two ranks; native inside nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.collectives.all_reduce_plan import (
    AllReducePlan,
    Share,
    all_reduce_codecs,
    plan_all_reduce,
)
from hybridcomp.collectives.first_hop import FirstHop
from hybridcomp.collectives.fused import fits, fused_all_reduce
from hybridcomp.collectives.hierarchical.intra_node import gather_inside, node_sum
from hybridcomp.collectives.wire.chunking import chunk_ranges
from hybridcomp.collectives.wire.encoding import POOL, check_residual, check_values, settle
from hybridcomp.collectives.wire.exchanges import accumulator, show_overflow
from hybridcomp.collectives.wire.group import Reduction
from hybridcomp.collectives.wire.handle import Handle, Steps, overlapped
from hybridcomp.collectives.wire.steps import add_alone, given


def all_reduce(tensor: Tensor, how: Reduction, async_op: bool = False) -> Handle:
    """Sum ``tensor`` over a group in place; all ranks end with the same bits.

    Quantizes twice, for any number W of ranks. With e1 the codec's bound for one rank's values and
    e2 its bound for the sum, the error is at most ``(W - 1) * e1 + e2``; a bounded codec splits its
    bound between the quantizations. Two ranks may quantize only once, with an error of at most
    ``2 * e1`` (``all_reduce_codecs``). In two levels nodes take the place of ranks.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16; must not be touched before ``wait()``.
        how: codec, group, meter, cuts, residuals and probe.
        async_op: return before the first message has arrived. Wait for asynchronous calls in the
            same order on all ranks: ``wait()`` posts the second message.

    Raises CodecError on other tensors.
    Source: two-hop all-reduce as in ZeRO++ (Wang et al. 2023, section 3.3).
    """
    tensor = tensor.detach()
    steps = _flat(tensor, how) if how.group.levels is None else _in_two_levels(tensor, how)
    return Handle(steps, how.meter, async_op)


def _in_two_levels(tensor: Tensor, how: Reduction) -> Steps[None]:
    """1 sum this rank's slice over the node, 2 all-reduce it between nodes, 3 gather inside."""
    levels, dtype = how.group.levels, tensor.dtype
    assert levels is not None
    if not tensor.numel():
        return
    codec = how.codec.for_presummed(levels.width, dtype)
    first = all_reduce_codecs(codec, torch.float32, levels.nodes, tensor.device, how.cuts)[0]
    codec = first if first.lossless else codec  # the codec's bound is too tight for a 16-bit sum
    lengths = [stop - start for start, stop in chunk_ranges(tensor.numel(), levels.width)]
    # 1
    buffer, work = yield from node_sum(tensor, lengths, codec, how)
    # 2
    between = how.between_nodes(codec)
    yield from _flat(work, between)
    # 3
    wire, rows = yield from gather_inside(work.to(dtype), lengths, levels, how.meter)
    for place, row in zip(torch.split(tensor, lengths), rows, strict=True):
        place.copy_(row)
    POOL.give(buffer, wire)


def _planned(tensor: Tensor, how: Reduction) -> AllReducePlan:
    """Return the cached plan for messages like this one, making it for the first."""
    cuts, left = tuple(how.cuts), how.residual
    few = isinstance(left, QuantizedResidual)
    kinds = (few and fits(left, how.owner_residual), type(left), how.flush)
    key = ("all_reduce", id(how.codec), tensor.numel(), tensor.dtype, tensor.device, cuts, *kinds)
    found: AllReducePlan | None = how.group.plans.get(key)
    if found is None:
        found = plan_all_reduce(tensor, how)
        rounds = len(found.first.rounds) if found.first is not None else 0
        weight = how.group.size * rounds + len(cuts)
        found = how.group.keep(key, found, 1 + weight)
    return found


def _flat(tensor: Tensor, how: Reduction) -> Steps[None]:
    """Sum on one level: in three launches, in a swap between two ranks, or over chunk owners.

    Returns the generator of the chosen steps; a ``yield from`` would cost time at each step.
    """
    group = how.group
    check_values("tensor", tensor)
    if how.residual is not None:
        check_residual("residual", how.residual, tensor.numel())
    if how.owner_residual is not None:
        start, stop = chunk_ranges(tensor.numel(), group.size)[group.rank]
        check_residual("owner_residual", how.owner_residual, stop - start)
    if group.size == 1 and how.residual is not None:
        add_alone(how.residual, tensor)
    if group.size == 1 or tensor.numel() == 0:
        return given(None)
    if how.probe is not None:
        how.probe(tensor, how.cuts, how.residual)
    plan = _planned(tensor, how)
    how.meter.used.update(plan.specs)
    if plan.fused is not None:
        return fused_all_reduce(tensor, plan.codecs[0], plan.fused, how)
    assert plan.first is not None
    if plan.shares:
        return _over_owners(tensor, plan, plan.first, how)
    return _swap(tensor, plan.first, how)


def _swap(tensor: Tensor, first: FirstHop, how: Reduction) -> Steps[None]:
    """Sum over two ranks: each sends all its values to the other, and decodes its own payload.

    A swap sends as many bytes as two hops, in which each rank sends half of its values and then
    half of the sums. But a swap encodes values only once, so a relative bound allows each encoding
    twice the error, fixed-size codecs make two thirds of the squared error, and there is one wait
    instead of two. Both ranks add the same two decoded tensors, and a + b equals b + a bit by bit.
    """
    buffer, total = None, tensor
    if tensor.dtype != torch.float32:
        buffer, total = POOL.take_fp32(tensor.numel(), tensor.device)
    residuals = None if how.residual is None else [how.residual]
    yield from first.sum([tensor], residuals, total, how)
    if buffer is not None:
        with how.meter.coding():
            tensor.copy_(total)
    POOL.give(buffer)


def _over_owners(
    tensor: Tensor, plan: AllReducePlan, first: FirstHop, how: Reduction
) -> Steps[None]:
    """Sum this rank's chunk and send it to all others, in overlapping rounds (``_round``)."""
    own, kept = tensor[plan.mine], how.owner_residual
    can = how.group.rank <= 1 or first.by == "table"
    in_place = can and kept is None and own.dtype == torch.float32
    buffer, total, begin = accumulator(kept, own if in_place else None, own)
    residuals = None if how.residual is None else [how.residual]
    steps = [
        _round(
            each([tensor], residuals, total, how, begin, in_place), share, tensor, own, total, how
        )
        for each, share in zip(first.rounds, plan.shares, strict=True)
    ]
    yield from overlapped(steps)
    POOL.give(buffer)


def _round(
    steps: Steps[Tensor],
    share: Share,
    tensor: Tensor,
    own: Tensor,
    total: Tensor,
    how: Reduction,
) -> Steps[None]:
    """1 sum a part of this rank's chunk by ``steps``, 2 send the sum to all, 3 keep its residual.

    ``own``: this rank's chunk of ``tensor``; ``total``: fp32 buffer for the sum of that chunk.
    """
    kept, summed = how.owner_residual, total[share.mine]
    # 1
    yield from steps
    if tensor.dtype == torch.float16:
        show_overflow(summed)
    # 2
    yield from share.steps(summed, tensor, how)
    # 3
    if kept is None:
        return
    with how.meter.coding():
        settle(summed, own[share.mine])
        if isinstance(kept, QuantizedResidual):
            kept[share.mine].pack(summed)
