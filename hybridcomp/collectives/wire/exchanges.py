"""Exchange payloads between ranks: encode, all-to-all the bytes, and sum what arrives.

``exchange`` returns views of the payloads; ``sum_parts``, the first half of every reduction, sends
encoded parts to their owners, which add them in fp32. What does not depend on values is planned
once (``exchange_plan``); long messages are sent in rounds (``message_rounds``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from hybridcomp.codecs.base import MultiTensorKernel
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual
from hybridcomp.codecs.residual_runs import ALL, ResidualRun, runs
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.batched_kernels import add_at_once, encode_jobs
from hybridcomp.collectives.wire.encoding import (
    POOL,
    Coder,
    EncodeRequest,
    add_values,
    decode_fp32,
    encode_job,
    encode_sum,
    settle_job,
)
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, Payloads, SumPlan
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.handle import UNDER_WAY, Meter, Steps
from hybridcomp.collectives.wire.varying import Varying, cut_payloads


def exchange(
    plan: ExchangePlan, jobs: Sequence[EncodeRequest], group: Group, meter: Meter
) -> Steps[Payloads]:
    """Encode the ``jobs`` of ``plan``, and exchange their payloads in an all-to-all.

    The caller gives the ``buffers`` of the result back to the pool.

    1 encode every job once, into slots that follow each other by destination
    2 variable-size codecs: exchange the sizes, unless these precede the payloads in the message
    3 exchange the bytes; on a CPU meanwhile decode this rank's own payloads and update residuals
    """
    clock = meter.clock
    # 1
    start = clock.begin()
    varying = None if plan.codec.fixed_size else Varying(plan)
    sent = _encode(plan, jobs) if varying is None else varying.encode(jobs)
    clock.end(meter, "codec", start)
    # 2
    gives, takes, arriving = plan.gives, plan.takes, plan.arriving
    if varying is not None:
        gives, takes, arriving = yield from varying.exchange_sizes(sent, group, meter)
    # 3
    buffer, wire = POOL.take_bytes(takes.total, plan.device)
    sent.buffers.append(buffer)
    message = transport.all_to_all(wire, sent.leaving, takes, gives, group, meter)
    if plan.device.type == "cpu":
        yield UNDER_WAY  # on every rank, whatever it sends, so that all ranks keep the same order
    if sent.is_unsettled:
        start = clock.begin()
        for job, payload in zip(jobs, sent.encoded, strict=True):
            if job.residual is not None or job.decoded is not None:
                settle_job(plan.coder, job, payload, plan.dtype)
        clock.end(meter, "codec", start)
    yield message
    if varying is not None:
        heads = plan.heads[1]
        sent.received = cut_payloads(wire, takes.numels, heads, arriving, plan.codec, group)
    else:
        flat = iter(torch.split(wire, plan.pieces))
        sent.received = [list(islice(flat, len(row))) for row in arriving]
    return sent


def _encode(plan: ExchangePlan, jobs: Sequence[EncodeRequest]) -> Payloads:
    """Encode each job as a payload of fixed size, and copy it for further destinations."""
    out, leaving = POOL.take_bytes(plan.gives.total, plan.device)
    slots = torch.split(leaving, plan.slots)
    encoded = [slots[place] for place in plan.places]
    each, later = plan.each if len(jobs) > 1 else None, plan.settles_later
    if each is not None and encode_jobs(each, jobs, encoded, plan.dtype):
        later = False
    else:
        encode = encode_sum if later else encode_job
        for job, slot in zip(jobs, encoded, strict=True):
            encode(plan.coder, job, slot, plan.dtype)
    for here, there in plan.copies:
        slots[there].copy_(slots[here])
    return Payloads(encoded, [out], leaving, later)


def sum_parts(
    plan: SumPlan,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor,
    via: Transfer,
    begin: Tensor | None = None,
    in_place: bool = False,
) -> Steps[Tensor]:
    """Sum the parts that this rank owns into ``total`` (fp32); update residuals; return ``total``.

    1 encode each part for its owners, 2 exchange, 3 sum in fp32 in rank order.

    Args:
        values, residuals: by ``source``.
        begin: None, or ``total``, to whose contents the sums are then added.
        in_place: whether ``total`` is this rank's part of ``values``; only on ranks 0 and 1, where
            starting from the own values gives the bits of rank order, as x0 + x1 == x1 + x0.
    """
    coder, dtype, meter, me = plan.exchange.coder, plan.exchange.dtype, via.meter, via.group.rank
    # 1, 2
    jobs = [
        EncodeRequest(
            values[part.source][part.start : part.stop],
            None if residuals is None else residuals[part.source][part.start : part.stop],
            total[part.place :][: part.stop - part.start]
            if plan.ahead and me in part.owners
            else None,
        )
        for part in plan.sent
    ]
    payloads = yield from exchange(plan.exchange, jobs, via.group, meter)
    # 3
    start = meter.clock.begin()
    rows: list[list[Tensor | None]] = [
        [*row] if row else [None] * len(plan.owned) for row in payloads.received
    ]
    rows[me] = [
        None if job is None or plan.ahead else payloads.encoded[job] for _, job in plan.owned
    ]
    sums, left = _begin(plan, values, residuals, None if in_place else total, begin is not None)
    if plan.exchange.each is not None:
        for row in rows:
            _add_row(sums, row, plan.exchange.each, plan.exchange)
    elif plan.exchange.varying is not None and sums:
        outs, own = [each.out for each in sums], [each.own for each in sums]
        fresh = [each.fresh for each in sums]
        add_at_once(plan.exchange.varying, rows, me, outs, own, fresh, dtype)
    else:
        for sum_, column in zip(sums, zip(*rows, strict=True), strict=True):
            _add_column(sum_, column, coder, dtype)
    for one in left:
        one.zero_()
    meter.clock.end(meter, "codec", start)
    POOL.give(*payloads.buffers)
    return total


@dataclass
class _PartSum:
    """Unfinished sum of one part on an owner.

    Attributes:
        out: fp32, the sum so far.
        own: this rank's values, added exactly; None: ``out`` already includes them.
        fresh: whether ``out`` holds nothing yet.
    """

    out: Tensor
    own: Tensor | None
    fresh: bool


def _begin(
    plan: SumPlan,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor | None,
    begun: bool,
) -> tuple[list[_PartSum], Sequence[Tensor | ResidualRun]]:
    """Return this rank's sums, initialized, and the residuals that the sums include.

    Values that this rank adds unquantized are first added to their residual.
    """
    own, alone, left = list[Tensor](), list[int](), list[Residual]()
    for index, (part, job) in enumerate(plan.owned):
        own.append(values[part.source][part.start : part.stop])
        if residuals is not None and job is None:
            alone.append(index)
            left.append(residuals[part.source][part.start : part.stop])
    wide = [one for one in left if isinstance(one, Tensor)]
    held: Sequence[Tensor | ResidualRun] = wide
    if len(wide) < len(left):
        held = several = list(runs(left, ALL))
        wide = [one for run in several for one in run.unpack()]
    if plan.exchange.varying is not None and wide:
        plan.exchange.varying.accumulate(wide, [own[index] for index in alone])
    else:
        for index, one in zip(alone, wide, strict=True):
            add_values(one, own[index])
    if total is not None:
        for index, one in zip(alone, wide, strict=True):
            own[index] = one
        places = [total[part.place :][: part.stop - part.start] for part, _ in plan.owned]
        ahead = [plan.ahead and job is not None for _, job in plan.owned]
        rows = zip(places, own, ahead, strict=True)
        return [
            _PartSum(place, None, False) if done else _PartSum(place, one, not begun)
            for place, one, done in rows
        ], held
    for index, one in zip(alone, wide, strict=True):
        own[index].copy_(one)
    return [_PartSum(one, None, False) for one in own], held


def _add_column(
    sum_: _PartSum, column: Sequence[Tensor | None], coder: Coder, dtype: torch.dtype
) -> None:
    """Add all payloads of one sum, in rank order, so that the sum stays in the cache.

    ``column``: each rank's payload; None stands for this rank's exact values.
    """
    for payload in column:
        if payload is None:
            if sum_.own is not None and sum_.fresh:
                sum_.out.copy_(sum_.own)
            elif sum_.own is not None:
                add_values(sum_.out, sum_.own)
        elif sum_.fresh:
            decode_fp32(coder, payload, sum_.out, dtype)
        else:
            coder.decode_add(payload, sum_.out, dtype)
        sum_.fresh = False


def _add_row(
    sums: Sequence[_PartSum],
    row: Sequence[Tensor | None],
    each: MultiTensorKernel,
    plan: ExchangePlan,
) -> None:
    """Add one rank's payloads to the sums: one launch for empty sums, one for begun sums."""
    for begun in (False, True):
        chosen = [
            (payload, sum_.out)
            for payload, sum_ in zip(row, sums, strict=True)
            if payload is not None and sum_.fresh is not begun
        ]
        each.decode([payload for payload, _ in chosen], [out for _, out in chosen], add=begun)
    for payload, sum_ in zip(row, sums, strict=True):
        if payload is None:
            _add_column(sum_, [None], plan.coder, plan.dtype)
        sum_.fresh = False


def decode_fp32_all(plan: ExchangePlan, payloads: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Decode ``payloads`` of ``plan`` into fp32 ``out``; in few launches if possible."""
    if plan.each is not None and len(out) > 1:
        plan.each.decode(payloads, out)
    elif plan.varying is not None and len(out) > 1:
        plan.varying.decode_fp32(payloads, out, plan.dtype)
    else:
        for payload, one in zip(payloads, out, strict=True):
            decode_fp32(plan.coder, payload, one, plan.dtype)


def accumulator(
    kept: Residual | None, place: Tensor | None, like: Tensor
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return ``(buffer to give back, fp32 tensor for the sum of a chunk, its start values)``.

    The sum is computed where it needs no extra pass over memory: in ``place``, else in ``kept``,
    the fp32 residual of the second quantization. Otherwise it takes a buffer as long as ``like``.
    The start values are those of ``kept``.
    """
    buffer: Tensor | None = None
    if place is not None:
        total = place
    elif isinstance(kept, Tensor):
        total = kept
    else:
        buffer, total = POOL.take_fp32(like.numel(), like.device)
    return buffer, total, kept.unpack(total) if isinstance(kept, QuantizedResidual) else kept


def show_overflow(total: Tensor) -> None:
    """Set sums to Inf, in place, where fp16 would overflow, as a native sum would.

    Codecs saturate instead of overflowing, but loss scaling must see overflows.
    """
    total.copy_(torch.where(total.half().isinf(), total.half().float(), total))
