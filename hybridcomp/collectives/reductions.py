"""all_reduce of encoded values: two hops, or one between two ranks; native inside nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, CollectiveKernel
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual
from hybridcomp.collectives.fused import fits, fused_all_reduce
from hybridcomp.collectives.hierarchical.intra_node import gather_inside, node_sum
from hybridcomp.collectives.reduce_parts import ReducedPart, sum_parts
from hybridcomp.collectives.wire import (
    POOL,
    EncodeRequest,
    Handle,
    Range,
    Reduction,
    Steps,
    Transfer,
    add_alone,
    check_residual,
    check_values,
    chunk_ranges,
    decode_all,
    encode_all,
    exchange,
    gather,
    gather_room,
    given,
    overlapped,
    rounds,
    sent_dtype,
    settle,
    show_overflow,
    stretches,
)


def all_reduce_codecs(
    codec: Codec, dtype: torch.dtype, world_size: int, device: torch.device, cuts: Sequence[int]
) -> tuple[Codec, ...]:
    """Return the codecs of the quantizations of an ``all_reduce`` that returns ``dtype``.

    One where each of two ranks sends all values to the other (``_pair``), two everywhere else. On a
    GPU, two ranks take two hops if the codec has them in three launches: half the memory reads.
    """
    return _codecs(codec, dtype, world_size, device, cuts)[0]


def _codecs(
    codec: Codec, dtype: torch.dtype, world_size: int, device: torch.device, cuts: Sequence[int]
) -> tuple[tuple[Codec, ...], CollectiveKernel | None]:
    """Return ``all_reduce_codecs`` and the kernels for both hops in three launches, if any."""
    twice = codec.split_error_budget(2, world_size, result=dtype, exact=1)
    first, second = twice
    together = not cuts and (first is second or first == second)
    fused = first.fused(device) if together else None
    if world_size != 2 or fused is not None:
        return twice, fused
    return codec.split_error_budget(1, world_size, result=dtype), None


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
    """1 sum this rank's stretch over the node, 2 all-reduce it between nodes, 3 gather inside."""
    levels, dtype = how.group.levels, tensor.dtype
    assert levels is not None
    if not tensor.numel():
        return
    codec = how.codec.for_presummed(levels.width, dtype)
    first = all_reduce_codecs(codec, torch.float32, levels.nodes, tensor.device, how.cuts)[0]
    codec = first if first.lossless else codec  # a bound too tight for 16 bits
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


def _flat(tensor: Tensor, how: Reduction) -> Steps[None]:
    """Sum on one level: in three launches, in a swap between two ranks, or in rounds.

    Returns the generator of these steps instead of delegating to it, which would cost at each step.
    """
    group, device = how.group, tensor.device
    if group.size == 1 and how.residual is not None:
        add_alone(how.residual, tensor)
    if group.size == 1 or tensor.numel() == 0:
        return given(None)
    if how.probe is not None:
        how.probe(tensor, how.cuts, how.residual)
    codecs, fused = _codecs(how.codec, tensor.dtype, group.size, device, how.cuts)
    how.meter.use(*[each.spec for each in codecs])
    if fused is not None and fits(how.residual, how.owner_residual):
        return fused_all_reduce(tensor, codecs[0], fused, how)
    if len(codecs) == 1:
        via = Transfer(codecs[0], group, how.meter, flush=how.flush)
        rows = [stretches(0, tensor.numel(), how.cuts)]
        return overlapped(
            _pair(tensor, row, how.residual, via) for (row,) in rounds(rows, codecs, device, group)
        )
    return _in_rounds(tensor, codecs, how)


def _in_rounds(tensor: Tensor, codecs: Sequence[Codec], how: Reduction) -> Steps[None]:
    """Sum in rounds that overlap (``_round``)."""
    group, (first, second) = how.group, codecs
    chunks = chunk_ranges(tensor.numel(), group.size)
    own = tensor[slice(*chunks[group.rank])]
    scratch, total = _accumulator(own, how)
    whole = _WholeSum(tensor, own, total, chunks[group.rank][0], how)
    rows = [stretches(*chunk, how.cuts) for chunk in chunks]
    yield from overlapped(
        _round(whole, share, first, second) for share in rounds(rows, codecs, tensor.device, group)
    )
    POOL.give(scratch)


def _accumulator(own: Tensor, how: Reduction) -> tuple[Tensor | None, Tensor]:
    """Return ``(buffer to give back, fp32 tensor that will hold the sum)``.

    The sum is made where it takes no further pass over memory: on top of the owner's residual, or
    of this rank's values where that keeps the bits of the rank order (see ``ReducedPart``).
    """
    if isinstance(how.owner_residual, Tensor):
        return None, how.owner_residual
    if how.owner_residual is not None:
        buffer, total = POOL.take_fp32(own.numel(), own.device)
        return buffer, how.owner_residual.unpack(total)
    if own.dtype == torch.float32 and how.group.rank <= 1:
        return None, own
    return POOL.take_fp32(own.numel(), own.device)


@dataclass(frozen=True)
class _WholeSum:
    """The tensors of one all_reduce in two hops."""

    tensor: Tensor
    own: Tensor  # this rank's chunk of it
    total: Tensor  # fp32: where that chunk is summed
    start: int  # of the chunk in ``tensor``
    how: Reduction

    def parts(self, rows: Sequence[Sequence[Range]], sums: Sequence[Tensor]) -> list[ReducedPart]:
        """Return the stretches ``rows`` of all ranks as parts; this rank's have ``sums`` as out."""
        residual, me = self.how.residual, self.how.group.rank
        found = [
            ReducedPart(self.tensor[a:b], (rank,), None if residual is None else residual[a:b])
            for rank, row in enumerate(rows)
            for a, b in row
        ]
        in_place, fresh = self.total is self.own, self.how.owner_residual is None
        for part, out in zip((p for p in found if p.owners == (me,)), sums, strict=True):
            part.out, part.fresh = part.values if in_place else out, fresh
        return found


def _round(
    whole: _WholeSum, rows: Sequence[Sequence[Range]], first: Codec, second: Codec
) -> Steps[None]:
    """1-3 sum this rank's part (``sum_parts``), 4 encode the sum, 5 all-gather, 6 decode.

    ``rows``: by rank, the stretches of the tensor that it sums in this round.
    """
    group, meter, tensor = whole.how.group, whole.how.meter, whole.tensor
    row = rows[group.rank]
    mine = slice(row[0][0] - whole.start, row[-1][1] - whole.start) if row else slice(0, 0)
    numels = [[stop - start for start, stop in of_rank] for of_rank in rows]
    total = whole.total[mine]
    sums = torch.split(total, numels[group.rank])
    # 1-3
    hop = Transfer(first, group, meter, flush=whole.how.flush)
    yield from sum_parts(whole.parts(rows, sums), hop)
    # 4
    dtype, via = sent_dtype(second, tensor.dtype, wide=True), Transfer(second, group, meter)
    own = gather_room(numels, dtype, tensor.device, via)
    with meter.coding():
        show_overflow(total, tensor.dtype)
        encode_all(second, sums, own, dtype)
    # 5
    payloads, gathered = yield from gather(own, numels, dtype, via)
    # 6
    with meter.coding():
        places = [tensor[start:stop] for of_rank in rows for start, stop in of_rank]
        decode_all(second, list(chain(*payloads)), places)
        if whole.how.owner_residual is not None:
            settle(total, whole.own[mine])
        if isinstance(whole.how.owner_residual, QuantizedResidual):
            whole.how.owner_residual[mine].pack(total)
    POOL.give(own.buffer, gathered)


def _pair(
    tensor: Tensor, row: Sequence[Range], residual: Residual | None, via: Transfer
) -> Steps[None]:
    """1 encode and decode this rank's values, 2 exchange payloads, 3 add the other rank's values.

    As many bytes as in two hops, in which each sends half of its values and then half of the sums.
    But values are encoded once, so a relative bound allows each encoding twice the error, and
    codecs of fixed size make two thirds of the squared error; and there is one wait instead of two.
    Both ranks add the same two decoded tensors, and a + b is b + a, so their bits are equal.
    """
    me, start, stop = via.group.rank, row[0][0], row[-1][1]
    dtype = sent_dtype(via.codec, tensor.dtype, residual is not None, via.flush)
    # 1
    buffer, total = None, tensor[start:stop]
    if tensor.dtype != torch.float32:
        buffer, total = POOL.take_fp32(stop - start, tensor.device)
    sums = [total[low - start : high - start] for low, high in row]
    left = [None if residual is None else residual[low:high] for low, high in row]
    values = [tensor[low:high] for low, high in row]
    jobs = [EncodeRequest(*each) for each in zip(values, left, sums, strict=True)]
    # 2
    numels = [high - low for low, high in row]
    to = [jobs if rank != me else [] for rank in range(2)]
    come = [numels if rank != me else [] for rank in range(2)]
    payloads = yield from exchange(to, come, dtype, tensor.device, via)
    # 3
    with via.meter.coding():
        for payload, out in zip(payloads.received[1 - me], sums, strict=True):
            via.codec.decode_add(payload, out, dtype)
        if buffer is not None:
            tensor[start:stop].copy_(total)
    payloads.release()
    POOL.give(buffer)
