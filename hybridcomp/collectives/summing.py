"""The first half of every reduction: send encoded parts to their owners, who sum them in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.encoding import Job, add_values, decode_fp32, sent_dtype
from hybridcomp.collectives.exchange import exchange
from hybridcomp.collectives.handle import Steps
from hybridcomp.collectives.meter import Meter


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
        for index, (part, job) in enumerate(owned):
            rows = [row[index] if row else None for row in payloads.received]
            rows[me] = payloads.encoded[job] if job else None
            _sum(part, rows, codec, dtype)
    payloads.release()


def _sum(part: Part, payloads: Sequence[Tensor | None], codec: Codec, dtype: torch.dtype) -> None:
    """Sum one part; None stands for the own exact values."""
    out = part.out
    assert out is not None
    fresh = part.fresh and out is not part.values
    own = part.values
    if part.residual is not None and any(payload is None for payload in payloads):
        add_values(part.residual, part.values)
        own = part.residual
        if out is part.values:
            out.copy_(own)
    for payload in payloads:
        if payload is None:
            if out is not part.values and fresh:
                out.copy_(own)
            elif out is not part.values:
                add_values(out, own)
        elif fresh:
            decode_fp32(codec, payload, out, dtype)
        else:
            codec.decode_add(payload, out, dtype)
        fresh = False
    if own is part.residual:
        own.zero_()
