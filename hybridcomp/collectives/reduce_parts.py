"""The first half of every reduction: send encoded parts to their owners, who sum them in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec, Each
from hybridcomp.collectives.wire.encoding import Job, add_values, decode_fp32, sent_dtype
from hybridcomp.collectives.wire.exchange import exchange
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.meter import Meter


@dataclass
class Part:
    """A stretch of the tensor to reduce.

    ``out`` receives the sum on the owners (fp32) and is None elsewhere. It may be ``values`` itself
    on ranks 0 and 1: x0 + x1 == x1 + x0, so starting from the own values keeps the rank order.
    """

    values: Tensor
    owners: tuple[int, ...]  # group ranks
    residual: Tensor | None = None
    out: Tensor | None = None
    fresh: bool = True  # ``out`` holds nothing yet; otherwise the sum is added to it

    def exact_on(self, rank: int) -> bool:
        """Whether ``rank`` adds its own values unquantized.

        Only a sole owner may: several owners must hold the same sum, so each of them decodes its
        own contribution from the bytes that the others got.
        """
        return self.owners == (rank,)


def sum_parts(
    parts: Sequence[Part], codec: Codec, group: ProcessGroup | None, meter: Meter
) -> Steps[None]:
    """Fill in ``out`` of the parts that this rank owns; update the residuals.

    1 encode each part for its owners, 2 exchange, 3 sum in fp32 in rank order.
    """
    me, world_size = get_rank(group), get_world_size(group)
    wide = parts[0].residual is not None
    dtype = sent_dtype(codec, parts[0].values.dtype, wide)
    filled = [part for part in parts if part.values.numel()]
    # 1, 2
    jobs = [None if p.exact_on(me) else Job(p.values, p.residual) for p in filled]
    owned = [(part, job) for part, job in zip(filled, jobs, strict=True) if me in part.owners]
    numels = [part.values.numel() for part, _ in owned]
    payloads = yield from exchange(
        codec,
        dtype,
        [
            [j for p, j in zip(filled, jobs, strict=True) if j and rank in p.owners and rank != me]
            for rank in range(world_size)
        ],
        [numels if rank != me else [] for rank in range(world_size)],
        parts[0].values.device,
        group,
        meter,
    )
    # 3
    with meter.coding():
        rows: list[list[Tensor | None]] = [
            [*row] if row else [None] * len(owned) for row in payloads.received
        ]
        rows[me] = [payloads.encoded[job] if job else None for _, job in owned]
        _sum([part for part, _ in owned], rows, codec, dtype)
    payloads.release()


def _sum(
    parts: Sequence[Part],
    rows: Sequence[Sequence[Tensor | None]],
    codec: Codec,
    dtype: torch.dtype,
) -> None:
    """Sum ``parts`` in rank order: for each rank a row with the payload of every part.

    None stands for the own exact values. A launch for a row where the codec has that; else part by
    part, while a sum is in the cache.
    """
    each = codec.each(parts[0].values.device) if len(parts) > 1 else None
    columns = list(zip(*rows, strict=True))
    owns = [_own(part, None in column) for part, column in zip(parts, columns, strict=True)]
    if each is not None:
        _sum_rows(parts, owns, rows, each)
    else:
        for part, own, column in zip(parts, owns, columns, strict=True):
            fresh = _is_fresh(part)
            for payload in column:
                if payload is None:
                    _add_own(part, own, fresh)
                elif fresh:
                    decode_fp32(codec, payload, _out(part), dtype)
                else:
                    codec.decode_add(payload, _out(part), dtype)
                fresh = False
    for part, own in zip(parts, owns, strict=True):
        if own is part.residual:
            own.zero_()


def _sum_rows(
    parts: Sequence[Part],
    owns: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor | None]],
    each: Each,
) -> None:
    fresh = [_is_fresh(part) for part in parts]
    for row in rows:
        for add in (False, True):
            chosen = [
                (payload, _out(part))
                for payload, part, new in zip(row, parts, fresh, strict=True)
                if payload is not None and new is not add
            ]
            each.decode([payload for payload, _ in chosen], [out for _, out in chosen], add=add)
        for payload, part, own, new in zip(row, parts, owns, fresh, strict=True):
            if payload is None:
                _add_own(part, own, new)
        fresh = [False] * len(parts)


def _out(part: Part) -> Tensor:
    assert part.out is not None, "this rank does not own the part"
    return part.out


def _is_fresh(part: Part) -> bool:
    return part.fresh and part.out is not part.values


def _own(part: Part, exact: bool) -> Tensor:
    """What this rank adds where it adds its ``exact`` values: with the residual, which stands for
    the sum until it is zeroed."""
    if part.residual is None or not exact:
        return part.values
    add_values(part.residual, part.values)
    if part.out is part.values:
        part.values.copy_(part.residual)
    return part.residual


def _add_own(part: Part, own: Tensor, fresh: bool) -> None:
    if part.out is part.values:
        return  # they stand there already
    if fresh:
        _out(part).copy_(own)
    else:
        add_values(_out(part), own)
