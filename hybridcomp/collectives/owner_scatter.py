"""The second hop of a reduction to owners: sums on their way from where they were made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.owner_plan import Piece
from hybridcomp.collectives.wire.encoding import Job, decode_fp32
from hybridcomp.collectives.wire.exchange import exchange
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.collectives.wire.pipelining import Range, segments


def place(sums: dict[int, Tensor], start: int, stop: int) -> Tensor:
    """The view of ``[start, stop)`` in the sum of its run; ``sums`` are by where a run begins."""
    run = max(first for first in sums if first <= start)
    return sums[run][start - run : stop - run]


def piece_segments(
    pieces: Sequence[Piece], codec: Codec, device: torch.device, group: ProcessGroup | None
) -> list[list[Piece]]:
    """``pieces`` in segments with a share of every way from a source to its owners."""
    rows: dict[tuple[int, tuple[int, ...]], list[Range]] = {}
    for piece in pieces:
        rows.setdefault((piece.source, piece.ranks), []).append((piece.start, piece.stop))
    return [
        sorted(
            (
                Piece(start, stop, ranks, source)
                for (source, ranks), row in zip(rows, shares, strict=True)
                for start, stop in row
            ),
            key=lambda piece: piece.start,
        )
        for shares in segments(list(rows.values()), (codec,), device, group)
    ]


def spread(
    pieces: Sequence[Piece],
    mine: dict[Piece, Tensor],
    feedback: bool,
    sums: dict[int, Tensor],
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[None]:
    """1 send the sums of my chunk (``mine``) to their owners, 2 decode what I own into ``sums``.

    With ``feedback`` the memory behind ``mine`` becomes the residual of this quantization.
    """
    me, world_size = get_rank(group), get_world_size(group)
    # 1
    jobs = {p: Job(v, v if feedback else None) for p, v in mine.items() if not p.stays}
    outgoing = [
        [job for piece, job in jobs.items() if rank in piece.ranks and rank != me]
        for rank in range(world_size)
    ]
    incoming = [
        [p for p in pieces if p.source == rank != me and me in p.ranks]
        for rank in range(world_size)
    ]
    numels = [[piece.numel for piece in row] for row in incoming]
    payloads = yield from exchange(codec, dtype, outgoing, numels, device, group, meter)
    # 2
    arrived = [*zip(chain(*incoming), chain(*payloads.received), strict=True)]
    arrived += [(p, payloads.encoded[job]) for p, job in jobs.items() if me in p.ranks]
    with meter.coding():
        for piece, payload in arrived:
            decode_fp32(codec, payload, place(sums, piece.start, piece.stop), dtype)
        for piece, values in mine.items():
            if piece.stays:
                place(sums, piece.start, piece.stop).copy_(values)
                if feedback:
                    values.zero_()
    payloads.release()
