"""Send encoded parts to their owners, who sum them in fp32: the first half of every reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, MultiTensorKernel
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives.wire import (
    EncodeRequest,
    Steps,
    Transfer,
    add_values,
    decode_fp32,
    exchange,
    sent_dtype,
)


@dataclass
class ReducedPart:
    """A stretch of the tensor to reduce.

    ``out`` receives the sum on the owners (fp32) and is None elsewhere. It may be ``values`` itself
    on ranks 0 and 1: x0 + x1 == x1 + x0, so a sum that starts with this rank's values has the bits
    of one in rank order.
    """

    values: Tensor
    owners: tuple[int, ...]  # group ranks
    residual: Residual | None = None
    out: Tensor | None = None
    fresh: bool = True  # ``out`` holds nothing yet; otherwise the sum is added to it

    def exact_on(self, rank: int) -> bool:
        """Return whether ``rank`` adds its values unquantized.

        Only a sole owner may: several owners must hold the same sum, so each decodes its
        contribution from the payload that the others got.
        """
        return self.owners == (rank,)


def sum_parts(parts: Sequence[ReducedPart], via: Transfer) -> Steps[None]:
    """Fill in ``out`` of the parts that this rank owns; update the residuals.

    1 encode each part for its owners, 2 exchange, 3 sum in fp32 in rank order.
    """
    me, device = via.group.rank, parts[0].values.device
    wide = parts[0].residual is not None
    dtype = sent_dtype(via.codec, parts[0].values.dtype, wide, via.flush)
    filled = [part for part in parts if part.values.numel()]
    # 1, 2
    jobs = [None if p.exact_on(me) else EncodeRequest(p.values, p.residual) for p in filled]
    outgoing: list[list[EncodeRequest]] = [[] for _ in range(via.group.size)]
    for part, sent in zip(filled, jobs, strict=True):
        for rank in part.owners:
            if sent is not None and rank != me:
                outgoing[rank].append(sent)
    owned = [(part, job) for part, job in zip(filled, jobs, strict=True) if me in part.owners]
    numels = [part.values.numel() for part, _ in owned]
    incoming = [numels] * via.group.size
    incoming[me] = []
    payloads = yield from exchange(outgoing, incoming, dtype, device, via)
    # 3
    with via.meter.coding():
        rows: list[list[Tensor | None]] = [
            [*row] if row else [None] * len(owned) for row in payloads.received
        ]
        rows[me] = [payloads.encoded[job] if job else None for _, job in owned]
        sums = [_PartSum.of(part, exact=job is None) for part, job in owned]
        _add_rows(sums, rows, via.codec, dtype)
        for total in sums:
            total.settle()
    payloads.release()


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

    @classmethod
    def of(cls, part: ReducedPart, exact: bool) -> _PartSum:
        """Begin the sum; ``exact``: this rank adds its values and residual unquantized."""
        assert part.out is not None, "this rank does not own the part"
        in_place, residual = part.out is part.values, part.residual if exact else None
        own = part.values
        if residual is not None:
            own = residual if isinstance(residual, Tensor) else residual.unpack()
            add_values(own, part.values)
            if in_place:
                part.values.copy_(own)
        return cls(part.out, None if in_place else own, residual, part.fresh and not in_place)

    def add_own(self) -> None:
        """Add this rank's exact values."""
        if self.own is None:
            return
        if self.fresh:
            self.out.copy_(self.own)
        else:
            add_values(self.out, self.own)

    def settle(self) -> None:
        """Set the residual to 0 where it was added with the exact values."""
        if self.residual is not None:
            self.residual.zero_()


def _add_rows(
    sums: Sequence[_PartSum],
    rows: Sequence[Sequence[Tensor | None]],
    codec: Codec,
    dtype: torch.dtype,
) -> None:
    """Add up in rank order; ``rows``: for each rank a row with the payload of every sum.

    None stands for this rank's exact values. One launch per row where the codec has such kernels;
    else sum by sum, so that each stays in the cache.
    """
    each = codec.each(sums[0].out.device) if len(sums) > 1 else None
    if each is not None:
        for row in rows:
            _add_row(sums, row, each)
        return
    for total, column in zip(sums, zip(*rows, strict=True), strict=True):
        for payload in column:
            if payload is None:
                total.add_own()
            elif total.fresh:
                decode_fp32(codec, payload, total.out, dtype)
            else:
                codec.decode_add(payload, total.out, dtype)
            total.fresh = False


def _add_row(
    sums: Sequence[_PartSum], row: Sequence[Tensor | None], each: MultiTensorKernel
) -> None:
    """Add one rank's payloads to their sums, in one launch for fresh and one for begun sums."""
    for begun in (False, True):
        chosen = [
            (payload, total.out)
            for payload, total in zip(row, sums, strict=True)
            if payload is not None and total.fresh is not begun
        ]
        each.decode([payload for payload, _ in chosen], [out for _, out in chosen], add=begun)
    for payload, total in zip(row, sums, strict=True):
        if payload is None:
            total.add_own()
        total.fresh = False
