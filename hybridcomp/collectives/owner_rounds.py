"""Plan how a group reduces equal buckets: codecs, kernels and the messages of every round.

``owner_plan`` assigns sums to ranks; this module turns the assignment into one rank's messages,
with codec, dtype and cuts. A plan is made for the first bucket and kept with the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.first_hop import FirstHop, plan_first_hop
from hybridcomp.collectives.fused import fits
from hybridcomp.collectives.owner_exchange import OwnerExchange, balanced_exchange
from hybridcomp.collectives.owner_layout import SendingRank
from hybridcomp.collectives.owner_plan import (
    OwnedPart,
    OwnedSums,
    OwnerPlan,
    part_rounds,
    plan_of,
)
from hybridcomp.collectives.wire.chunking import OwnedRange, Range
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, plan_exchange, sent_dtype
from hybridcomp.collectives.wire.group import Group, Reduction, Transfer
from hybridcomp.collectives.wire.message_rounds import round_count
from hybridcomp.errors import CodecError


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Plan of a single-level reduction to owners, cached for buckets of one layout.

    Attributes:
        held: codec and ranges of the reduction, kept alive since the cache key has their ``id``.
        owners: the plan that assigns sums to ranks.
        mine: positions of this rank's sums.
        specs: spec of the codec of each quantization, one or two, for the meter.
        first: the hop to the owners (direct) or to the ranks that sum a chunk each (balanced); None
            if there is nothing to send.
        chunk: balanced: this rank's chunk of the even split.
        alone: position of this rank's chunk in the tensor of its sums, if this rank is its only
            owner and kernels sum it; the chunk is then summed at this position.
        table: balanced: the second hop by kernels for all its slices.
        scatters: balanced: the rounds of the second hop, if there are no such kernels.
    """

    held: tuple[Codec, Sequence[OwnedRange]]
    owners: OwnerPlan
    mine: OwnedSums
    specs: Mapping[str, None] = field(default_factory=dict)
    first: FirstHop | None = None
    chunk: OwnedRange | None = None
    alone: int | None = None
    table: OwnerExchange | None = None
    scatters: tuple[ScatterRound, ...] = ()


@dataclass(frozen=True, eq=False)
class ScatterRound:
    """One round in which sums go from the ranks that computed them to their owners.

    Ranges refer to this rank's chunk of the even split, or to the tensor of the sums that it owns.

    Attributes:
        exchange: exchange of the payloads.
        sent: ranges of the chunk that are encoded, one for each job of ``exchange``.
        arriving: ranges of the sums into which other ranks' payloads are decoded, by source.
        again: jobs whose payloads this rank also decodes, since it is one of several owners, each
            with its range of the sums.
        stays: ranges that only this rank needs, each as a range of the chunk and one of the sums.
    """

    exchange: ExchangePlan
    sent: list[Range]
    arriving: list[Range]
    again: list[tuple[int, Range]]
    stays: list[tuple[Range, Range]]


def plan_bucket(tensor: Tensor, ranges: Sequence[OwnedRange], how: Reduction) -> BucketPlan:
    """Plan the reduction of tensors like ``tensor``; raise CodecError if ranges do not cover it."""
    group, held = how.group, (how.codec, ranges)
    owners = plan_of(tuple(ranges), group.size)
    if owners.numel != tensor.numel():
        raise CodecError(
            f"ranges: expected to cover {tensor.numel()} elements, found {owners.numel}"
        )
    mine = owners.sums_of(group.rank)
    plan = BucketPlan(held, owners, mine)
    if group.size == 1 or not owners.runs:
        return plan
    if owners.even is not None:
        return _balanced(tensor, plan, owners.even, how)
    codecs = how.codec.split_error_budget(1, group.size, exact=int(owners.sole))
    first = plan_first_hop(owners, codecs, tensor, how, how.residual is not None)
    return replace(plan, specs={codecs[0].spec: None}, first=first)


def _balanced(tensor: Tensor, plan: BucketPlan, even: OwnerPlan, how: Reduction) -> BucketPlan:
    """Plan to sum the chunks of ``even`` and to send the sums to their owners.

    A bounded codec must encode the same slices in both hops, so both hops are also cut where the
    owner changes.
    """
    group, device, owners, cuts = how.group, tensor.device, plan.owners, tuple(how.cuts)
    codecs = how.codec.split_error_budget(2, group.size, exact=1)
    if how.codec.bounded:
        cuts = tuple(sorted({*cuts, *(run.start for run in owners.runs)}))
    via = Transfer(codecs[0], group, how.meter, cuts, flush=how.flush)
    chunk = even.ranges[0].stop if fits(how.residual) else 0
    first = plan_first_hop(even, codecs[:1], tensor, via, how.residual is not None, chunk=chunk)
    specs, own = dict.fromkeys(each.spec for each in codecs), even.ranges[group.rank]
    plan, kernel = replace(plan, specs=specs, first=first, chunk=own), codecs[1].planned(device)
    if kernel is None:
        dtype = sent_dtype(codecs[1], tensor.dtype, wide=True, flush=how.flush)
        count = round_count(owners.longest, codecs[1:], device, group)
        made = [
            _scatter_round(share, plan, codecs[1], dtype, device, group)
            for share in part_rounds(owners.runs, cuts, group.size, count)
        ]
        return replace(plan, scatters=tuple(made))
    sending = SendingRank(group.rank, group.size, codecs[1], torch.float32, device, cuts)
    table = balanced_exchange(owners, kernel, sending)
    alone = None if first.by == "rounds" else _alone_at(plan, group.rank)
    if alone is not None:
        table = replace(table, stays=())
    return replace(plan, alone=alone, table=table)


def _alone_at(plan: BucketPlan, me: int) -> int | None:
    """Return where rank ``me``'s chunk starts in its sums; None unless it alone owns the chunk."""
    chunk = plan.chunk
    assert chunk is not None
    for run in plan.owners.runs:
        if chunk.start < chunk.stop and run.start <= chunk.start and chunk.stop <= run.stop:
            return plan.mine.place_of(chunk.start) if run.ranks == (me,) else None
    return None


def _scatter_round(
    parts: Sequence[OwnedPart],
    plan: BucketPlan,
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> ScatterRound:
    assert plan.chunk is not None
    me, start = group.rank, plan.chunk.start
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
    )
