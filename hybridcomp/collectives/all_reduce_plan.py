"""Plan how a group all-reduces equal messages: codecs and both hops.

A plan is made for the first message and kept with the group (``all_reduction``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, CollectiveKernel, PlannedKernel
from hybridcomp.codecs.launches import PlannedStretch
from hybridcomp.collectives.first_hop import FirstHop, plan_first_hop
from hybridcomp.collectives.fused import fits, places_of
from hybridcomp.collectives.fused_parts import gather_by_table
from hybridcomp.collectives.owner_plan import direct_plan, even_ranges
from hybridcomp.collectives.wire.chunking import OwnedRange, Range, chunk_ranges, stretches
from hybridcomp.collectives.wire.exchange_plan import sent_dtype
from hybridcomp.collectives.wire.gathers import gather_slices, plan_gather
from hybridcomp.collectives.wire.group import Reduction, Transfer
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.message_rounds import rounds


@dataclass(frozen=True, eq=False)
class AllReducePlan:
    """Plan of a single-level all-reduce, cached for messages of one size and dtype.

    Attributes:
        codec: codec of the reduction, kept alive since the cache key has its ``id``.
        codecs: codec of each quantization, one or two; ``specs``: their specs, for the meter.
        mine: this rank's chunk.
        fused: kernels for both hops in three launches.
        first: the first hop: between two ranks a swap, else from all ranks to chunk owners.
        shares: rounds of the second hop, from chunk owners to all ranks.
    """

    codec: Codec
    codecs: tuple[Codec, ...]
    specs: dict[str, None]
    mine: slice
    fused: CollectiveKernel | None = None
    first: FirstHop | None = None
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, eq=False)
class Share:
    """One round of the second hop.

    Attributes:
        mine: slice of this rank's chunk that the round sends.
        steps: makes the steps that all-gather the sums of all ranks' slices into the tensor.
    """

    mine: slice
    steps: Callable[[Tensor, Tensor, Transfer], Steps[None]]


def all_reduce_codecs(
    codec: Codec, dtype: torch.dtype, world_size: int, device: torch.device, cuts: Sequence[int]
) -> tuple[Codec, ...]:
    """Return the codec of each quantization in an ``all_reduce`` that returns ``dtype``.

    Returns one codec if two ranks swap all their values (``_swap``), else one for each of two hops.
    On a GPU two ranks also use two hops if the codec runs them in three launches: this reads half
    as much memory as a swap.
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


def plan_all_reduce(tensor: Tensor, how: Reduction) -> AllReducePlan:
    """Plan the single-level sum of tensors like ``tensor``."""
    group, device, numel = how.group, tensor.device, tensor.numel()
    feedback = how.residual is not None
    codecs, fused = _codecs(how.codec, tensor.dtype, group.size, device, how.cuts)
    specs, chunks = dict.fromkeys(each.spec for each in codecs), chunk_ranges(numel, group.size)
    common = how.codec, codecs, specs, slice(*chunks[group.rank])
    if fused is not None and fits(how.residual, how.owner_residual):
        return AllReducePlan(*common, fused)
    if len(codecs) == 1:
        both = direct_plan((OwnedRange(0, numel, (0, 1)),))
        return AllReducePlan(*common, first=plan_first_hop(both, codecs, tensor, how, feedback))
    even = direct_plan(tuple(even_ranges(numel, group.size)))
    first = plan_first_hop(even, codecs, tensor, how, feedback)
    rows = [stretches(*chunk, how.cuts) for chunk in chunks]
    kernel = codecs[1].planned(device) if first.by == "table" else None
    if kernel is not None:
        return AllReducePlan(*common, None, first, (_by_table(rows, kernel, codecs[1], how),))
    shares = rounds(rows, codecs, device, group)
    return AllReducePlan(
        *common, None, first, tuple(_plan_round(share, tensor, codecs[1], how) for share in shares)
    )


def _plan_round(
    rows: Sequence[Sequence[Range]], tensor: Tensor, codec: Codec, how: Reduction
) -> Share:
    """Plan a round; ``rows``: for each rank, the slices of ``tensor`` whose sums it sends."""
    group, row = how.group, rows[how.group.rank]
    begin = chunk_ranges(tensor.numel(), group.size)[group.rank][0]
    numels = [[stop - start for start, stop in of_rank] for of_rank in rows]
    wide = sent_dtype(codec, tensor.dtype, wide=True)
    plan = plan_gather(numels, codec, wide, tensor.device, group)
    mine = slice(row[0][0] - begin, row[-1][1] - begin) if row else slice(0, 0)
    return Share(mine, partial(gather_slices, plan, numels[group.rank], list(chain(*rows))))


def _by_table(
    rows: Sequence[Sequence[Range]], kernel: PlannedKernel, codec: Codec, how: Reduction
) -> Share:
    """Plan one gather of all ranks' ``rows``; every rank's slot has the length of the longest."""
    me, ranks = how.group.rank, how.group.size
    slot = max(_laid_out(row, 0, 0, codec)[1] for row in rows)
    begin = rows[me][0][0] if rows[me] else 0
    sent, _ = _laid_out(rows[me], 0, begin, codec)
    arriving = [
        one for rank, row in enumerate(rows) for one in _laid_out(row, rank * slot, 0, codec)[0]
    ]
    tables, places = (kernel.table(sent), kernel.table(arriving)), places_of(slot, ranks * slot)
    return Share(slice(None), partial(gather_by_table, kernel, *tables, places))


def _laid_out(
    row: Sequence[Range], payload: int, begin: int, codec: Codec
) -> tuple[list[PlannedStretch], int]:
    """Lay out the payloads of ``row`` from byte ``payload`` on; return slices and total bytes."""
    sizes = [codec.wire_nbytes(high - low, torch.float32) for low, high in row]
    places = accumulate(sizes, initial=payload)
    made = [
        PlannedStretch(low - begin, high - low, place, low - begin)
        for (low, high), place in zip(row, places, strict=False)
    ]
    return made, sum(sizes)
