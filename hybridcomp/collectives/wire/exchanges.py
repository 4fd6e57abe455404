"""Exchange payloads between ranks: encode, all-to-all the bytes, and sum what arrives.

``exchange`` returns views of the payloads; ``sum_parts``, the first half of every reduction, sends
encoded parts to their owners, who add them in fp32. What does not depend on the values is planned
(``exchange_plan``); long messages go in rounds (``message_rounds``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs.base import MultiTensorKernel
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual, as_fp32
from hybridcomp.codecs.residual_runs import ALL, ResidualRun, runs
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.batched_kernels import add_at_once
from hybridcomp.collectives.wire.encoding import (
    POOL,
    Coder,
    EncodeRequest,
    add_values,
    decode_fp32,
    encode_job,
    encode_sum,
    settle,
    settle_job,
)
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, Payloads, SumPlan
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import UNDER_WAY, Meter, Steps
from hybridcomp.collectives.wire.varying import Varying, cut_payloads


def exchange(
    plan: ExchangePlan, jobs: Sequence[EncodeRequest], group: Group, meter: Meter
) -> Steps[Payloads]:
    """Encode the ``jobs`` of ``plan``, and exchange their payloads in an all-to-all.

    The caller returns their ``buffers`` to the pool after use.

    1 encode every job once, into slots that follow each other by destination
    2 variable-size codecs: exchange the sizes, unless these precede the payloads in the message
    3 exchange the bytes; on a CPU decode this rank's jobs and settle residuals meanwhile
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
        yield UNDER_WAY  # yielded on every rank, whatever it sends, so that all keep the same order
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


def encode_jobs(
    each: MultiTensorKernel,
    jobs: Sequence[EncodeRequest],
    slots: Sequence[Tensor],
    dtype: torch.dtype,
) -> bool:
    """Encode all ``jobs`` as ``dtype`` in one launch if possible; return whether it was done.

    The codec has a fixed size. It is not possible if a job has ``decoded``, or has its sum as
    residual.
    """
    plain = [job.residual is None for job in jobs]
    if any(job.decoded is not None or job.values is job.residual for job in jobs):
        return False
    if all(plain):
        each.encode([job.values.to(dtype) for job in jobs], slots)
        return True
    residuals = [job.residual for job in jobs if job.residual is not None]
    few = [one for one in residuals if isinstance(one, QuantizedResidual)]
    if len(residuals) < len(jobs) or dtype != torch.float32 or not all(r.in_blocks for r in few):
        return False
    each.encode([job.values for job in jobs], slots, residuals)
    return True


def sum_parts(
    plan: SumPlan,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor | None,
    group: Group,
    meter: Meter,
    begun: bool = False,
) -> Steps[Any]:
    """Sum the parts that this rank owns into ``total`` (fp32), update the residuals, return it.

    ``values`` and ``residuals``: by ``source``. ``begun``: the sums are added to the contents of
    ``total``. Without a ``total`` the sums replace ``values``; only with ranks 0 and 1, for which
    x0 + x1 == x1 + x0 gives the bits of rank order.

    1 encode each part for its owners, 2 exchange, 3 sum in fp32 in rank order.
    """
    coder, dtype = plan.exchange.coder, plan.exchange.dtype
    # 1, 2
    jobs = [
        EncodeRequest(
            values[part.source][part.start : part.stop],
            None if residuals is None else residuals[part.source][part.start : part.stop],
        )
        for part in plan.sent
    ]
    payloads = yield from exchange(plan.exchange, jobs, group, meter)
    # 3
    start = meter.clock.begin()
    rows: list[list[Tensor | None]] = [
        [*row] if row else [None] * len(plan.owned) for row in payloads.received
    ]
    rows[group.rank] = [None if job is None else payloads.encoded[job] for _, job in plan.owned]
    sums, left = _begin(plan, values, residuals, total, begun)
    if plan.each is not None:
        for row in rows:
            _add_row(sums, row, plan.each)
    elif plan.exchange.varying is not None and sums:
        outs, own = [each.out for each in sums], [each.own for each in sums]
        fresh = [each.fresh for each in sums]
        add_at_once(plan.exchange.varying, rows, group.rank, outs, own, fresh, dtype)
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

    def add_own(self) -> None:
        """Add this rank's exact values."""
        if self.own is None:
            return
        if self.fresh:
            self.out.copy_(self.own)
        else:
            add_values(self.out, self.own)


def _begin(
    plan: SumPlan,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor | None,
    begun: bool,
) -> tuple[list[_PartSum], Sequence[Tensor | ResidualRun]]:
    """Return the initialized sums that this rank owns, and the residuals that they include.

    Values that it adds unquantized are first added to its residual.
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
        rows = zip(places, own, strict=True)
        return [_PartSum(place, one, not begun) for place, one in rows], held
    for index, one in zip(alone, wide, strict=True):
        own[index].copy_(one)
    return [_PartSum(one, None, False) for one in own], held


def _add_column(
    sum_: _PartSum, column: Sequence[Tensor | None], coder: Coder, dtype: torch.dtype
) -> None:
    """Add up one sum in rank order, so that it stays in the cache.

    ``column``: each rank's payload; None stands for this rank's exact values.
    """
    for payload in column:
        if payload is None:
            sum_.add_own()
        elif sum_.fresh:
            decode_fp32(coder, payload, sum_.out, dtype)
        else:
            coder.decode_add(payload, sum_.out, dtype)
        sum_.fresh = False


def _add_row(
    sums: Sequence[_PartSum], row: Sequence[Tensor | None], each: MultiTensorKernel
) -> None:
    """Add one rank's payloads to their sums: one launch for empty sums, one for the others."""
    for begun in (False, True):
        chosen = [
            (payload, sum_.out)
            for payload, sum_ in zip(row, sums, strict=True)
            if payload is not None and sum_.fresh is not begun
        ]
        each.decode([payload for payload, _ in chosen], [out for _, out in chosen], add=begun)
    for payload, sum_ in zip(row, sums, strict=True):
        if payload is None:
            sum_.add_own()
        sum_.fresh = False


def add_alone(residual: Residual, values: Tensor) -> None:
    """Add ``residual`` to ``values`` in place: the sum over a group of one rank.

    The rounding error of the dtype of ``values`` stays in the residual.
    """
    sums = as_fp32(residual)
    add_values(sums, values)
    values.copy_(sums)
    settle(sums, values)
    if isinstance(residual, QuantizedResidual):
        residual.pack(sums)


def show_overflow(total: Tensor, dtype: torch.dtype) -> None:
    """Set sums to Inf (in place) where ``dtype`` would overflow, as native sums would be.

    Codecs saturate instead of overflowing, but loss scaling must see overflows.
    """
    if dtype == torch.float16:
        total.copy_(torch.where(total.half().isinf(), total.half().float(), total))
