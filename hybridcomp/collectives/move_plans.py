"""Plan how a group gathers and exchanges equal messages: codec, kernels and rounds.

A plan is made for the first message and kept with the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, CollectiveKernel, PlannedKernel
from hybridcomp.collectives.wire.chunking import Range, stretches
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, plan_exchange
from hybridcomp.collectives.wire.gathers import GatherPlan, plan_gather
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.message_rounds import rounds
from hybridcomp.collectives.wire.splits import Splits


@dataclass(frozen=True, eq=False)
class MovePlan:
    """Cached plan of a single-level gather or exchange, which goes one of three ways.

    Attributes:
        held: codec of the message and, for an exchange, its ``Splits``; kept alive, since the cache
            key has their ``id``.
        codec: codec of the quantization.
        fused: first way: kernels for equal chunks, in two launches.
        parts: second way: kernels for shards with cuts or unequal parts, in two launches.
    """

    held: tuple[object, ...]
    codec: Codec
    fused: CollectiveKernel | None
    parts: PlannedKernel | None


@dataclass(frozen=True, eq=False)
class AllGatherPlan(MovePlan):
    """Plan of a gather; ``rounds``: third way: the slices of a shard that each round gathers."""

    rounds: list[tuple[list[Range], GatherPlan]]


def plan_all_gather(shard: Tensor, via: Transfer) -> AllGatherPlan:
    """Plan the single-level gather of shards like ``shard``."""
    group, dtype, device = via.group, shard.dtype, shard.device
    (codec,) = via.codec.split_error_budget(1, 1, result=dtype)
    fused = None if via.cuts else codec.fused(device)
    parts = codec.planned(device) if via.cuts else None
    each: list[tuple[list[Range], GatherPlan]] = []
    if fused is None and parts is None:
        for (row,) in rounds([stretches(0, shard.numel(), via.cuts)], (codec,), device, group):
            numels = [[stop - start for start, stop in row]] * group.size
            if row:
                each.append((row, plan_gather(numels, codec, dtype, device, group)))
    return AllGatherPlan((via.codec,), codec, fused, parts, each)


@dataclass(frozen=True, eq=False)
class AllToAllPlan(MovePlan):
    """Plan of an exchange of parts; ``exchange``: third way: the exchange of the payloads."""

    exchange: ExchangePlan | None


def plan_all_to_all(
    takes: Splits, gives: Splits, dtype: torch.dtype, device: torch.device, via: Transfer
) -> AllToAllPlan:
    """Plan an exchange of parts; ``takes``, ``gives``: elements from and to each rank."""
    group = via.group
    (codec,) = via.codec.split_error_budget(1, 1, result=dtype)
    fused = codec.fused(device) if takes.each == gives.each > 0 else None
    parts = codec.planned(device) if fused is None else None
    each = None
    if fused is None and parts is None:
        each = _plan_parts(takes, gives, codec, dtype, device, group)
    return AllToAllPlan((via.codec, takes, gives), codec, fused, parts, each)


def _plan_parts(
    takes: Splits, gives: Splits, codec: Codec, dtype: torch.dtype, device: torch.device,
    group: Group,
) -> ExchangePlan:  # fmt: skip
    others = [rank != group.rank for rank in range(group.size)]
    jobs = [numel for numel, other in zip(gives.numels, others, strict=True) if numel and other]
    number = iter(range(len(jobs)))
    rows = [[next(number)] if n and o else [] for n, o in zip(gives.numels, others, strict=True)]
    come = [[n] if n and other else [] for n, other in zip(takes.numels, others, strict=True)]
    return plan_exchange(rows, jobs, come, codec, dtype, device, group)
