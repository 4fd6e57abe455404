"""Plan a reduce-scatter: kernels for shards that are contiguous in memory, rounds for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hybridcomp.codecs.base import Codec, CollectiveKernel, PlannedKernel
from hybridcomp.collectives.owner_plan import OwnerPlan
from hybridcomp.collectives.wire import Group, SummedPart, SumPlan, plan_sum, rounds, stretches


@dataclass(frozen=True, eq=False)
class ReduceScatterPlan:
    """Cached plan of a single-level reduce-scatter of messages with equal shards.

    Attributes:
        held: the codec of the reduction, kept alive for the key.
        codec, spec: codec of the quantization, and its spec.
        fused: kernels for two launches, for shards contiguous in memory; ``parts``: kernels if
            there are cuts.
        whole: the shards and cuts of such a message as positions in one tensor, set by the first
            one.
        rounds: rounds for other messages, planned for the first of them.
        is_one: whether the rounds take values and residuals as one tensor each.
    """

    held: Codec
    codec: Codec
    spec: str
    fused: CollectiveKernel | None
    parts: PlannedKernel | None
    is_one: bool
    whole: list[tuple[OwnerPlan, tuple[int, ...]]] = field(default_factory=list)
    rounds: list[SumPlan] = field(default_factory=list)


def plan_rounds(
    lengths: Sequence[int],
    cuts: Sequence[Sequence[int]] | None,
    plan: ReduceScatterPlan,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> list[SumPlan]:
    """Plan the rounds of shards of these ``lengths``, encoded as ``dtype`` between their cuts."""
    rows = [stretches(0, length, cuts[rank] if cuts else ()) for rank, length in enumerate(lengths)]
    return [
        plan_sum(
            [
                SummedPart(low + rank * lengths[0], high + rank * lengths[0], (rank,), low)
                if plan.is_one
                else SummedPart(low, high, (rank,), low, rank)
                for rank, row in enumerate(share)
                for low, high in row
            ],
            plan.codec,
            dtype,
            device,
            group,
        )
        for share in rounds(rows, (plan.codec,), device, group)
    ]
