"""all_reduce of encoded values: two hops, or one between two ranks; native inside nodes."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.collectives.all_reduce_plan import (
    AllReducePlan,
    PairRound,
    SumRound,
    all_reduce_codecs,
    plan_all_reduce,
)
from hybridcomp.collectives.cut_all_reduce import CutSwap, cut_all_reduce, cut_swap
from hybridcomp.collectives.fused import fits, fused_all_reduce
from hybridcomp.collectives.hierarchical.intra_node import gather_inside, node_sum
from hybridcomp.collectives.wire import (
    POOL,
    EncodeRequest,
    Handle,
    Reduction,
    Steps,
    add_alone,
    check_residual,
    check_values,
    chunk_ranges,
    decode_all,
    encode_all,
    exchange,
    gather,
    given,
    overlapped,
    settle,
    show_overflow,
    sum_parts,
)


def all_reduce(tensor: Tensor, how: Reduction, async_op: bool = False) -> Handle:
    """Sum ``tensor`` over a group in place; all ranks end with the same bits.

    Quantizes twice, for any number of ranks. With e1 the codec's bound for one rank's values and e2
    that for the sum, the error is at most ``(W - 1) * e1 + e2``. A bounded codec splits its bound
    over the two. Two ranks may quantize once, with an error of at most ``2 * e1``
    (``all_reduce_codecs``). In two levels nodes take the place of ranks.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16; must not be touched before ``wait()``.
        how: codec, group, meter, cuts, residuals and probe.
        async_op: return before the first message has arrived. Wait for asynchronous calls in the
            same order on all ranks: ``wait()`` posts the second message.

    Raises CodecError on other tensors.
    Source: two-hop all-reduce as in ZeRO++ (Wang et al. 2023, section 3.3).
    """
    tensor = tensor.detach()
    if how.group.levels is None:
        _check(tensor, how)
    steps = _flat if how.group.levels is None else _in_two_levels
    return Handle(steps(tensor, how), how.meter, async_op)


def _check(tensor: Tensor, how: Reduction) -> None:
    check_values("tensor", tensor)
    check_residual("residual", how.residual, tensor.numel())
    if how.owner_residual is not None:
        start, stop = chunk_ranges(tensor.numel(), how.group.size)[how.group.rank]
        check_residual("owner_residual", how.owner_residual, stop - start)


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
    _check(work, between)
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
        weight = how.group.size * (len(found.pairs) + len(found.rounds)) + len(cuts)
        found = how.group.keep(key, found, 1 + weight)
    return found


def _flat(tensor: Tensor, how: Reduction) -> Steps[None]:
    """Sum on one level: in a few launches, in a swap between two ranks, or in rounds.

    Returns the generator of these steps, since delegating to it would cost time at each step.
    """
    group = how.group
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
    if isinstance(plan.cut, CutSwap):
        return cut_swap(tensor, plan.cut, how)
    if plan.cut is not None:
        return cut_all_reduce(tensor, plan.cut, plan.codecs, how)
    if plan.pairs:
        swaps = [_pair(tensor, each, how) for each in plan.pairs]
        return overlapped(swaps)
    return _in_rounds(tensor, plan, how)


def _in_rounds(tensor: Tensor, plan: AllReducePlan, how: Reduction) -> Steps[None]:
    """Sum in overlapping rounds (``_round``)."""
    own = tensor[slice(*chunk_ranges(tensor.numel(), how.group.size)[how.group.rank])]
    scratch, total = _accumulator(own, how)
    yield from overlapped([_round(tensor, own, total, each, how) for each in plan.rounds])
    POOL.give(scratch)


def _accumulator(own: Tensor, how: Reduction) -> tuple[Tensor | None, Tensor]:
    """Return ``(buffer to give back, fp32 tensor that will hold the sum)``.

    The sum is computed where it needs no extra pass over memory: in the owner's residual, or in
    this rank's values if that gives the same bits as rank order (see ``sum_parts``).
    """
    if isinstance(how.owner_residual, Tensor):
        return None, how.owner_residual
    if how.owner_residual is not None:
        buffer, total = POOL.take_fp32(own.numel(), own.device)
        return buffer, how.owner_residual.unpack(total)
    if own.dtype == torch.float32 and how.group.rank <= 1:
        return None, own
    return POOL.take_fp32(own.numel(), own.device)


def _round(
    tensor: Tensor, own: Tensor, total: Tensor, plan: SumRound, how: Reduction
) -> Steps[None]:
    """1-3 sum this rank's part (``sum_parts``), 4 encode the sum, 5 all-gather, 6 decode.

    ``own``: this rank's chunk of ``tensor``; ``total``: fp32 buffer for the sum of that chunk.
    """
    group, meter, clock, kept = how.group, how.meter, how.meter.clock, how.owner_residual
    # 1-3
    residuals = None if how.residual is None else [how.residual]
    place = None if total is own else total
    yield from sum_parts(plan.sum, [tensor], residuals, place, group, meter, kept is not None)
    # 4
    mine = slice(*plan.mine)
    summed = total[mine]
    start = clock.begin()
    show_overflow(summed, tensor.dtype)
    encoded = encode_all(plan.gather, torch.split(summed, plan.lengths))
    clock.end(meter, "codec", start)
    # 5
    payloads, gathered = yield from gather(encoded, plan.gather, group, meter)
    # 6
    start = clock.begin()
    places = [tensor[low:high] for low, high in plan.stretches]
    decode_all(plan.gather, list(chain(*payloads)), places)
    if kept is not None:
        settle(summed, own[mine])
    if isinstance(kept, QuantizedResidual):
        kept[mine].pack(summed)
    clock.end(meter, "codec", start)
    POOL.give(encoded.buffer, gathered)


def _pair(tensor: Tensor, plan: PairRound, how: Reduction) -> Steps[None]:
    """1 encode and decode this rank's values, 2 exchange payloads, 3 add the other rank's values.

    This sends as many bytes as two hops, in which each rank sends half of its values and then half
    of the sums. But values are encoded only once, so a relative bound allows each encoding twice
    the error, fixed-size codecs make two thirds of the squared error, and there is one wait instead
    of two. Both ranks add the same two decoded tensors, and a + b is b + a, so their bits are
    equal.
    """
    row, coder, meter, residual = plan.row, plan.exchange.coder, how.meter, how.residual
    begin, stop = row[0][0], row[-1][1]
    # 1
    buffer, total = None, tensor[begin:stop]
    if tensor.dtype != torch.float32:
        buffer, total = POOL.take_fp32(stop - begin, tensor.device)
    sums = [total[low - begin : high - begin] for low, high in row]
    left = [None if residual is None else residual[low:high] for low, high in row]
    values = [tensor[low:high] for low, high in row]
    jobs = [EncodeRequest(*each) for each in zip(values, left, sums, strict=True)]
    # 2
    payloads = yield from exchange(plan.exchange, jobs, how.group, meter)
    # 3
    start = meter.clock.begin()
    received, varying = payloads.received[1 - how.group.rank], plan.exchange.varying
    if varying is not None and len(sums) > 1:
        varying.add([[payload] for payload in received], sums, plan.exchange.dtype)
    else:
        for payload, out in zip(received, sums, strict=True):
            coder.decode_add(payload, out, plan.exchange.dtype)
    if buffer is not None:
        tensor[begin:stop].copy_(total)
    meter.clock.end(meter, "codec", start)
    POOL.give(buffer, *payloads.buffers)
