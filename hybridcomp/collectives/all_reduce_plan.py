"""Plan how a group all-reduces equal messages: codecs, kernels and the messages of rounds.

A plan is made for the first message and kept with the group (``all_reduction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, CollectiveKernel
from hybridcomp.collectives.cut_all_reduce import CutAllReduce, CutSwap, plan_cut
from hybridcomp.collectives.fused import fits
from hybridcomp.collectives.wire import (
    ExchangePlan,
    GatherPlan,
    Group,
    Range,
    Reduction,
    SummedPart,
    SumPlan,
    chunk_ranges,
    plan_exchange,
    plan_gather,
    plan_sum,
    rounds,
    sent_dtype,
    stretches,
)


@dataclass(frozen=True, eq=False)
class AllReducePlan:
    """Plan of a single-level all-reduce, cached for messages of one size and dtype.

    Attributes:
        codec: codec of the reduction, kept alive for the key.
        codecs: codecs of the quantizations, with their ``specs`` for the meter.
        fused: kernels for three launches.
        cut: plan with cuts, whose kernels process all slices in one launch.
        pairs: rounds of a swap between two ranks, with one quantization.
        rounds: rounds with two quantizations.
    """

    codec: Codec
    codecs: tuple[Codec, ...]
    specs: dict[str, None]
    fused: CollectiveKernel | None = None
    cut: CutAllReduce | CutSwap | None = None
    pairs: tuple[PairRound, ...] = ()
    rounds: tuple[SumRound, ...] = ()


@dataclass(frozen=True, eq=False)
class PairRound:
    """One round of a swap between two ranks, of the slices ``row`` of the tensor."""

    row: list[Range]
    exchange: ExchangePlan


@dataclass(frozen=True, eq=False)
class SumRound:
    """One round of a sum: all ranks' slices of the tensor, and this rank's slices of its chunk."""

    stretches: list[Range]
    mine: Range
    lengths: list[int]  # elements of each slice of this rank's chunk
    sum: SumPlan
    gather: GatherPlan


def all_reduce_codecs(
    codec: Codec, dtype: torch.dtype, world_size: int, device: torch.device, cuts: Sequence[int]
) -> tuple[Codec, ...]:
    """Return the codecs of the quantizations of an ``all_reduce`` that returns ``dtype``.

    It is one codec if each of two ranks sends all its values to the other (``_pair``), else two. On
    a GPU two ranks use two hops if the codec does them in three launches, with half the memory
    reads.
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
    group, device, wide = how.group, tensor.device, how.residual is not None
    codecs, fused = _codecs(how.codec, tensor.dtype, group.size, device, how.cuts)
    specs = dict.fromkeys(each.spec for each in codecs)
    if fused is not None and fits(how.residual, how.owner_residual):
        return AllReducePlan(how.codec, codecs, specs, fused)
    cut = plan_cut(tensor, codecs, how) if how.cuts or fused is not None else None
    if cut is not None:
        return AllReducePlan(how.codec, codecs, specs, cut=cut)
    dtype = sent_dtype(codecs[0], tensor.dtype, wide, how.flush)
    if len(codecs) == 1:
        rows = [stretches(0, tensor.numel(), how.cuts)]
        pairs = []
        for (row,) in rounds(rows, codecs, device, group):
            jobs, other = list(range(len(row))), 1 - group.rank
            numels = [stop - start for start, stop in row]
            to, come = (
                [each if rank == other else [] for rank in range(2)] for each in (jobs, numels)
            )
            plan = plan_exchange(to, numels, come, codecs[0], dtype, device, group)
            pairs.append(PairRound(row, plan))
        return AllReducePlan(how.codec, codecs, specs, pairs=tuple(pairs))
    chunks = chunk_ranges(tensor.numel(), group.size)
    rows, begin = [stretches(*chunk, how.cuts) for chunk in chunks], chunks[group.rank][0]
    return AllReducePlan(
        how.codec,
        codecs,
        specs,
        rounds=tuple(
            _plan_round(share, begin, dtype, tensor, codecs, group)
            for share in rounds(rows, codecs, device, group)
        ),
    )


def _plan_round(
    rows: Sequence[Sequence[Range]],
    begin: int,
    dtype: torch.dtype,
    tensor: Tensor,
    codecs: Sequence[Codec],
    group: Group,
) -> SumRound:
    """Plan a round; ``rows``: for each rank, the slices of ``tensor`` that it sums.

    ``begin``: start of this rank's chunk. ``dtype``: dtype in which values are sent.
    """
    (first, second), device, row = codecs, tensor.device, rows[group.rank]
    parts = [
        SummedPart(low, high, (rank,), low - begin if rank == group.rank else 0)
        for rank, of_rank in enumerate(rows)
        for low, high in of_rank
    ]
    numels = [[stop - start for start, stop in of_rank] for of_rank in rows]
    wide = sent_dtype(second, tensor.dtype, wide=True)
    return SumRound(
        list(chain(*rows)),
        (row[0][0] - begin, row[-1][1] - begin) if row else (0, 0),
        numels[group.rank],
        plan_sum(parts, first, dtype, device, group),
        plan_gather(numels, second, wide, device, group),
    )
