"""Reduction of a bucket whose ranges belong to given ranks, as in ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.owner_plan import (
    OwnedRange,
    cut_at_chunks,
    even_ranges,
    merge_neighbours,
    plan_reduction,
)
from hybridcomp.collectives.owner_scatter import piece_segments, place, spread
from hybridcomp.collectives.reduce_parts import Part, sum_parts
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.chunks import chunk_ranges, stretches
from hybridcomp.collectives.wire.encoding import check_residual, check_values, sent_dtype
from hybridcomp.collectives.wire.handle import Pending, Steps
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.collectives.wire.pipelining import Range, overlapped, segments
from hybridcomp.errors import CodecError


def reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    codec: Codec,
    group: ProcessGroup | None,
    *,
    meter: Meter,
    residual: Tensor | None = None,
    owner_residual: Tensor | None = None,
    cuts: Sequence[int] = (),
) -> list[Tensor]:
    """Sum ``tensor`` over ``group``, each range at its owners only.

    The plan is that of ``plan_reduction``. The error of an element is at most ``W * e1`` (direct)
    or ``(W - 1) * e1 + e2`` (balanced). Owners of one range get the same bits.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16, not modified.
        ranges: cover ``tensor`` in order, each with at least one rank; the same on all ranks.
        residual: fp32, ``tensor.numel()`` elements: error feedback of the first quantization.
        owner_residual: fp32, as long as this rank's chunk of ``chunk_ranges``: that of the second
            one; only the balanced plan uses it. Each is given on all ranks or on none.
        cuts: ascending elements where no codec block may reach across; the same on all ranks.
        codec, group, meter: as for ``all_reduce``.

    Returns the fp32 sum of every range that this rank owns, in the order of ``ranges``; the
    tensors may be views of one buffer that belongs to the caller.
    Raises CodecError on other tensors, or when the ranges do not cover the tensor.
    """
    tensor = tensor.detach()
    me, world_size = get_rank(group), get_world_size(group)
    check_values("tensor", tensor)
    check_residual("residual", residual, tensor.numel())
    _check_ranges(ranges, tensor.numel(), world_size)
    runs = merge_neighbours([owned for owned in ranges if owned.start < owned.stop])
    sums = {
        run.start: tensor.new_empty(run.stop - run.start, dtype=torch.float32)
        for run in runs
        if me in run.ranks
    }
    if world_size == 1:
        for start, out in sums.items():
            out.copy_(tensor[start : start + out.numel()])
    elif runs and plan_reduction(ranges, world_size) == "direct":
        Pending(_direct(tensor, runs, sums, codec, group, meter, residual, cuts), meter, False)
    elif runs:
        start, stop = chunk_ranges(tensor.numel(), world_size)[me]
        check_residual("owner_residual", owner_residual, stop - start)
        steps = _balanced(tensor, runs, sums, codec, group, meter, residual, owner_residual, cuts)
        Pending(steps, meter, False)
    empty = tensor.new_empty(0, dtype=torch.float32)
    return [
        place(sums, owned.start, owned.stop) if owned.start < owned.stop else empty
        for owned in ranges
        if me in owned.ranks
    ]


def _check_ranges(ranges: Sequence[OwnedRange], numel: int, world_size: int) -> None:
    position = 0
    for owned in ranges:
        if owned.start != position or owned.stop < owned.start:
            raise CodecError(f"ranges: expected a range from {position}, found {owned}")
        known = all(0 <= rank < world_size for rank in owned.ranks)
        if not owned.ranks or not known or len(set(owned.ranks)) != len(owned.ranks):
            raise CodecError(
                f"ranges: expected distinct group ranks below {world_size}, found {owned}"
            )
        position = owned.stop
    if position != numel:
        raise CodecError(f"ranges: expected to cover {numel} elements, found {position}")


def _cut(ranges: Sequence[OwnedRange], cuts: Sequence[int]) -> list[OwnedRange]:
    return [
        OwnedRange(low, high, owned.ranks)
        for owned in ranges
        for low, high in stretches(owned.start, owned.stop, cuts)
    ]


def _parts(tensor: Tensor, ranges: Sequence[OwnedRange], residual: Tensor | None) -> list[Part]:
    views = [slice(owned.start, owned.stop) for owned in ranges]
    return [
        Part(tensor[view], owned.ranks, None if residual is None else residual[view])
        for view, owned in zip(views, ranges, strict=True)
    ]


def _direct(
    tensor: Tensor,
    runs: Sequence[OwnedRange],
    sums: dict[int, Tensor],
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None,
    cuts: Sequence[int],
) -> Steps[None]:
    me, world_size = get_rank(group), get_world_size(group)
    sole = all(len(run.ranks) == 1 for run in runs)
    (first,) = codec.hops(1, world_size, exact=int(sole))
    meter.use(first.spec)
    yield from overlapped(
        sum_parts(_owned_parts(tensor, segment, sums, residual, me), first, group, meter)
        for segment in _segments(_cut(runs, cuts), first, tensor.device, group)
    )


def _segments(
    ranges: Sequence[OwnedRange], codec: Codec, device: torch.device, group: ProcessGroup | None
) -> list[list[OwnedRange]]:
    """``ranges`` in segments that give every owner its share of each, so that none is idle."""
    rows: dict[tuple[int, ...], list[Range]] = {}
    for owned in ranges:
        rows.setdefault(owned.ranks, []).append((owned.start, owned.stop))
    return [
        sorted(
            (
                OwnedRange(start, stop, ranks)
                for ranks, row in zip(rows, shares, strict=True)
                for start, stop in row
            ),
            key=lambda owned: owned.start,
        )
        for shares in segments(list(rows.values()), (codec,), device, group)
    ]


def _owned_parts(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    sums: dict[int, Tensor],
    residual: Tensor | None,
    me: int,
) -> list[Part]:
    """The parts at ``ranges``; those that ``me`` owns go to their place in ``sums``."""
    parts = _parts(tensor, ranges, residual)
    for part, owned in zip(parts, ranges, strict=True):
        if me in owned.ranks:
            part.out = place(sums, owned.start, owned.stop)
    return parts


def _balanced(
    tensor: Tensor,
    runs: Sequence[OwnedRange],
    sums: dict[int, Tensor],
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None,
    owner_residual: Tensor | None,
    cuts: Sequence[int],
) -> Steps[None]:
    """1 sum my chunk of the even split, 2 send the sums on (``spread``).

    A bounded codec must see the same stretches in both, so it cuts where owners change as well.
    """
    me, world_size = get_rank(group), get_world_size(group)
    first, second = codec.hops(2, world_size, exact=1)
    meter.use(first.spec, second.spec)
    if codec.bounded:
        cuts = sorted({*cuts, *(run.start for run in runs)})
    even = even_ranges(tensor.numel(), world_size)
    # 1
    buffer, total = None, owner_residual
    if total is None:
        buffer, total = POOL.take_fp32(even[me].stop - even[me].start, tensor.device)
    yield from overlapped(
        sum_parts(
            _even_parts(tensor, segment, total, even[me].start, residual, owner_residual, me),
            first,
            group,
            meter,
        )
        for segment in _segments(_cut(even, cuts), first, tensor.device, group)
    )
    # 2
    dtype = sent_dtype(second, tensor.dtype, wide=True)
    pieces = cut_at_chunks(_cut(runs, cuts), world_size)
    feedback = owner_residual is not None
    messages = []
    for segment in piece_segments(pieces, second, tensor.device, group):
        mine = {p: total[p.start - even[me].start :][: p.numel] for p in segment if p.source == me}
        messages.append(
            spread(segment, mine, feedback, sums, second, dtype, tensor.device, group, meter)
        )
    yield from overlapped(messages)
    POOL.give(buffer)


def _even_parts(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    total: Tensor,
    start: int,
    residual: Tensor | None,
    owner_residual: Tensor | None,
    me: int,
) -> list[Part]:
    """The parts at ``ranges``; those of ``me`` go to ``total``, which begins at ``start``."""
    parts = _parts(tensor, ranges, residual)
    for part, owned in zip(parts, ranges, strict=True):
        if part.owners == (me,):
            part.out = total[owned.start - start : owned.stop - start]
            part.fresh = owner_residual is None
    return parts
