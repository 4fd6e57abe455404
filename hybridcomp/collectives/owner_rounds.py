"""Plan how a group reduces equal buckets: codecs, kernels and the messages of every round.

``owner_plan`` assigns sums to ranks; this module turns that into one rank's messages, with codec,
dtype and cuts. A plan is made for the first bucket and kept with the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, CollectiveKernel, MultiTensorKernel, PlannedKernel
from hybridcomp.collectives.fused import fits
from hybridcomp.collectives.owner_exchange import even_plan
from hybridcomp.collectives.owner_plan import (
    OwnedPart,
    OwnedSums,
    OwnerPlan,
    find_plan,
    part_rounds,
    range_rounds,
)
from hybridcomp.collectives.wire import (
    ExchangePlan,
    Group,
    OwnedRange,
    Range,
    Reduction,
    SummedPart,
    SumPlan,
    plan_exchange,
    plan_sum,
    round_count,
    sent_dtype,
)
from hybridcomp.errors import CodecError


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Plan of a single-level reduction to owners, cached for buckets of one layout.

    Attributes:
        held: codec and ranges of the reduction, kept alive for the key.
        owners, mine: the plan that assigns sums to ranks, and the positions of this rank's sums.
        codecs: codecs of the quantizations, one in a direct plan and two in a balanced one;
            ``specs``: their specs for the meter.
        kernel: kernel for the slices of a direct plan, or of the second hop of a balanced one.
        cuts: cuts at parameters; for a bounded codec also at changes of owner.
        fused: kernels for the first hop of a balanced plan; ``parts``: kernels and plan of that hop
            if there are cuts.
        alone: position of this rank's chunk in the tensor of its sums, if no other rank needs any
            of it and kernels sum it; it is then summed in place.
        sums: the rounds of the first hop without such kernels.
        scatters: the rounds of the second hop without such kernels.
    """

    held: tuple[Codec, Sequence[OwnedRange]]
    owners: OwnerPlan
    mine: OwnedSums
    codecs: tuple[Codec, ...] = ()
    specs: Mapping[str, None] = field(default_factory=dict)
    kernel: PlannedKernel | None = None
    cuts: tuple[int, ...] = ()
    fused: CollectiveKernel | None = None
    parts: tuple[PlannedKernel, OwnerPlan] | None = None
    alone: int | None = None
    sums: tuple[SumPlan, ...] = ()
    scatters: tuple[ScatterRound, ...] = ()


@dataclass(frozen=True, eq=False)
class ScatterRound:
    """One round in which sums go from the ranks that computed them to their owners.

    Ranges refer to this rank's chunk of the even split, or to the tensor of the sums that it owns.

    Attributes:
        exchange: exchange of the payloads; ``sent``: its jobs, as ranges of the chunk.
        arriving: ranges into which other ranks' payloads are decoded, by source.
        again: jobs whose payloads this rank also decodes, as one of several owners, with their
            target ranges.
        stays: ranges that only this rank needs: in the chunk, and in its sums.
        each: kernels for several payloads in one launch, if the back end has them.
    """

    exchange: ExchangePlan
    sent: list[Range]
    arriving: list[Range]
    again: list[tuple[int, Range]]
    stays: list[tuple[Range, Range]]
    each: MultiTensorKernel | None


def plan_bucket(tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction) -> BucketPlan:
    """Plan the sum of ``tensor``, or of one like it. Raises CodecError when the ranges do not cover
    the tensor."""
    group, held, cuts = how.group, (how.codec, ranges), tuple(how.cuts)
    owners = find_plan(ranges, group.size)
    if owners.numel != tensor.numel():
        raise CodecError(
            f"ranges: expected to cover {tensor.numel()} elements, found {owners.numel}"
        )
    mine = owners.sums_of(group.rank)
    if group.size == 1 or not owners.runs:
        return BucketPlan(held, owners, mine)
    make = _direct if owners.kind == "direct" else _balanced
    return make(tensor, BucketPlan(held, owners, mine), cuts, how)


def _direct(tensor: Tensor, plan: BucketPlan, cuts: tuple[int, ...], how: Reduction) -> BucketPlan:
    """Plan to send every range directly to its owners, each of which sums it."""
    group, device, owners, mine = how.group, tensor.device, plan.owners, plan.mine
    (codec,) = how.codec.split_error_budget(1, group.size, exact=int(owners.sole))
    kernel = codec.planned(device)
    sums: tuple[SumPlan, ...] = ()
    if kernel is None:
        wide = how.residual is not None
        dtype = sent_dtype(codec, tensor.dtype, wide, how.flush)
        count = round_count(owners.longest[0], (codec,), device, group)
        sums = tuple(
            plan_sum([_part(owned, mine, group) for owned in share], codec, dtype, device, group)
            for share in range_rounds(owners.runs, cuts, count)
        )
    specs = {codec.spec: None}
    return BucketPlan(plan.held, owners, mine, (codec,), specs, kernel, cuts, sums=sums)


def _part(owned: OwnedRange, mine: OwnedSums, group: Group) -> SummedPart:
    place = mine.place_of(owned.start) if group.rank in owned.ranks else 0
    return SummedPart(owned.start, owned.stop, owned.ranks, place)


def _balanced(
    tensor: Tensor, plan: BucketPlan, cuts: tuple[int, ...], how: Reduction
) -> BucketPlan:
    """Plan to sum an even split and to send the sums to their owners.

    A bounded codec must encode the same slices in both hops, so both are cut at changes of owner.
    """
    group, device, owners = how.group, tensor.device, plan.owners
    codecs = how.codec.split_error_budget(2, group.size, exact=1)
    if how.codec.bounded:
        cuts = tuple(sorted({*cuts, *(run.start for run in owners.runs)}))
    fused = None if cuts or not fits(how.residual) else codecs[0].fused(device)
    first, kernel = codecs[0].planned(device), codecs[1].planned(device)
    parts, alone = None, _alone_at(owners, plan.mine, group.rank)
    if first is not None and fused is None:
        parts = first, even_plan(owners.numel, owners.lengths[0], group.size)
    sums: tuple[SumPlan, ...] = ()
    scatters: tuple[ScatterRound, ...] = ()
    if fused is None and parts is None:
        alone = None
        wide, start = how.residual is not None, owners.even[group.rank].start
        dtype = sent_dtype(codecs[0], tensor.dtype, wide, how.flush)
        count = round_count(owners.longest[1], codecs[:1], device, group)
        sums = tuple(
            plan_sum(
                [
                    SummedPart(
                        owned.start,
                        owned.stop,
                        owned.ranks,
                        owned.start - start if owned.ranks == (group.rank,) else 0,
                    )
                    for owned in share
                ],
                codecs[0],
                dtype,
                device,
                group,
            )
            for share in range_rounds(owners.even, cuts, count)
        )
    if kernel is None:
        dtype = sent_dtype(codecs[1], tensor.dtype, wide=True, flush=how.flush)
        count = round_count(owners.longest[2], codecs[1:], device, group)
        scatters = tuple(
            _scatter_round(share, plan, codecs[1], dtype, device, group)
            for share in part_rounds(owners.runs, cuts, group.size, count)
        )
    specs = dict.fromkeys(each.spec for each in codecs)
    return BucketPlan(
        plan.held,
        owners,
        plan.mine,
        codecs,
        specs,
        kernel,
        cuts,
        fused,
        parts,
        None if kernel is None else alone,
        sums,
        scatters,
    )


def _alone_at(owners: OwnerPlan, mine: OwnedSums, me: int) -> int | None:
    """Return the start of rank ``me``'s chunk in its sums, if it is the only owner of all of it."""
    chunk = owners.even[me]
    for run in owners.runs:
        if chunk.start < chunk.stop and run.start <= chunk.start and chunk.stop <= run.stop:
            return mine.place_of(chunk.start) if run.ranks == (me,) else None
    return None


def _scatter_round(
    parts: Sequence[OwnedPart],
    plan: BucketPlan,
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> ScatterRound:
    me, start = group.rank, plan.owners.even[group.rank].start
    rows: list[list[int]] = [[] for _ in range(group.size)]
    come: list[list[OwnedPart]] = [[] for _ in range(group.size)]
    sent = [part for part in parts if part.source == me and not part.stays]
    for job, part in enumerate(sent):
        for rank in part.ranks:
            if rank != me:
                rows[rank].append(job)
    for part in parts:
        if part.source != me and me in part.ranks:
            come[part.source].append(part)

    def here(part: OwnedPart) -> Range:
        return part.start - start, part.stop - start

    def there(part: OwnedPart) -> Range:
        place = plan.mine.place_of(part.start)
        return place, place + part.numel

    numels = [[part.numel for part in row] for row in come]
    jobs = [part.numel for part in sent]
    return ScatterRound(
        plan_exchange(rows, jobs, numels, codec, dtype, device, group),
        [here(part) for part in sent],
        [there(part) for row in come for part in row],
        [(job, there(part)) for job, part in enumerate(sent) if me in part.ranks],
        [(here(part), there(part)) for part in parts if part.source == me and part.stays],
        codec.each(device),
    )
