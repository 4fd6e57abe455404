"""Send encoded parts to their owners, who sum them in fp32: the first half of every reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, MultiTensorKernel
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives.wire import (
    POOL,
    EncodeRequest,
    ExchangePlan,
    Group,
    Meter,
    Steps,
    add_values,
    decode_fp32,
    exchange,
    plan_exchange,
)


class SummedPart(NamedTuple):
    """A stretch of the tensors to reduce.

    Attributes:
        start, stop: its elements.
        owners: group ranks that need its sum.
        place: where the sum begins in this rank's tensor of sums, if it is an owner.
        source: number of the tensor that has it, where there are several.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    place: int = 0
    source: int = 0


@dataclass(frozen=True, eq=False)
class SumPlan:
    """One round of a reduction, as one rank takes part in it, for messages of any values.

    Attributes:
        exchange: of the payloads.
        sent: the parts that this rank encodes; job i of the exchange is number i of them.
        owned: the parts that it sums, each with the number of its job. None: it adds its values
            unquantized, as only a sole owner may: several owners must hold the same sum, so each
            decodes its contribution from the payload that the others got.
        each: kernels for all sums in one launch, where there are several and the back end has them.
    """

    exchange: ExchangePlan
    sent: list[SummedPart]
    owned: list[tuple[SummedPart, int | None]]
    each: MultiTensorKernel | None


def plan_sum(
    parts: Sequence[SummedPart],
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> SumPlan:
    """Plan the sum of ``parts``, the same on all ranks; ``dtype``: in which they are encoded."""
    me, filled = group.rank, [part for part in parts if part.start < part.stop]
    sent = [part for part in filled if part.owners != (me,)]
    rows: list[list[int]] = [[] for _ in range(group.size)]
    for job, part in enumerate(sent):
        for rank in part.owners:
            if rank != me:
                rows[rank].append(job)
    jobs = {part: job for job, part in enumerate(sent)}
    owned = [(part, jobs.get(part)) for part in filled if me in part.owners]
    numels = [part.stop - part.start for part, _ in owned]
    incoming = [numels] * group.size
    incoming[me] = []
    lengths = [part.stop - part.start for part in sent]
    return SumPlan(
        plan_exchange(rows, lengths, incoming, codec, dtype, device, group),
        sent,
        owned,
        codec.each(device) if len(owned) > 1 else None,
    )


def sum_parts(
    plan: SumPlan,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor | None,
    group: Group,
    meter: Meter,
    begun: bool = False,
) -> Steps[None]:
    """Sum the parts that this rank owns into ``total`` (fp32), and update the residuals.

    ``values`` and ``residuals``: by ``source``. ``begun``: the sums are added to what ``total``
    holds. Without a ``total`` sums are made in place of ``values``, only on ranks 0 and 1:
    x0 + x1 == x1 + x0, so that they have the bits of sums in rank order.

    1 encode each part for its owners, 2 exchange, 3 sum in fp32 in rank order.
    """
    codec, dtype = plan.exchange.codec, plan.exchange.dtype
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
    sums = [_begin(part, job, values, residuals, total, begun) for part, job in plan.owned]
    if plan.each is not None:
        for row in rows:
            _add_row(sums, row, plan.each)
    else:
        for sum_, column in zip(sums, zip(*rows, strict=True), strict=True):
            _add_column(sum_, column, codec, dtype)
    for sum_ in sums:
        if sum_.residual is not None:
            sum_.residual.zero_()
    meter.clock.end(meter, "codec", start)
    POOL.give(*payloads.buffers)


@dataclass
class _PartSum:
    """Unfinished sum of one part on an owner.

    Attributes:
        out: fp32, the sum so far.
        own: this rank's values where it adds them exactly; None: they are in ``out`` already.
        residual: this rank's, where ``own`` includes it; set to 0 in the end.
        fresh: whether ``out`` holds nothing yet.
    """

    out: Tensor
    own: Tensor | None
    residual: Residual | None
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
    part: SummedPart,
    job: int | None,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor | None,
    begun: bool,
) -> _PartSum:
    """Begin the sum of ``part``; without a ``job`` this rank adds its own values unquantized."""
    here = slice(part.start, part.stop)
    own, residual = values[part.source][here], None
    out = own if total is None else total[part.place : part.place + part.stop - part.start]
    if residuals is not None and job is None:
        residual, added = residuals[part.source][here], own
        own = residual if isinstance(residual, Tensor) else residual.unpack()
        add_values(own, added)
        if total is None:
            out.copy_(own)
    fresh = total is not None and not begun
    return _PartSum(out, None if total is None else own, residual, fresh)


def _add_column(
    sum_: _PartSum, column: Sequence[Tensor | None], codec: Codec, dtype: torch.dtype
) -> None:
    """Add up one sum in rank order, so that it stays in the cache.

    ``column``: each rank's payload; None stands for this rank's exact values.
    """
    for payload in column:
        if payload is None:
            sum_.add_own()
        elif sum_.fresh:
            decode_fp32(codec, payload, sum_.out, dtype)
        else:
            codec.decode_add(payload, sum_.out, dtype)
        sum_.fresh = False


def _add_row(
    sums: Sequence[_PartSum], row: Sequence[Tensor | None], each: MultiTensorKernel
) -> None:
    """Add one rank's payloads to their sums, in one launch for fresh and one for begun sums."""
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
