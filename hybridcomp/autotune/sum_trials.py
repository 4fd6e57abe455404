"""Build trials of gradient sums, with the residuals of error feedback: native and encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridcomp import collectives
from hybridcomp.autotune.trials import Run, StepTraffic, TrialGroup
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual, split, zeros
from hybridcomp.collectives import Meter, OwnedRange, Reduction, chunk_ranges
from hybridcomp.collectives.wire.transport import reduce_scatter_single


def reductions(
    codec: Codec, feedback: int, where: TrialGroup
) -> Callable[[StepTraffic], tuple[Run, Run]]:
    """Build trials of gradient sums; ``feedback``: bits of the residuals, 0 for none."""

    def trial(sent: StepTraffic) -> tuple[Run, Run]:
        longest, world_size = max(sent.numels), where.group.size
        values = where.values(longest)
        kept = _residuals(sent, where, feedback) if feedback else None
        chosen = [codec.for_message(numel, where.dtype, world_size) for numel in sent.numels]
        reduce = _Reduce(sent, where)

        def coded() -> None:
            for index, (numel, kept_codec) in enumerate(zip(sent.numels, chosen, strict=True)):
                held = (None, None) if kept is None else _cut_residuals(kept, numel, sent, where)
                reduce.coded(values[:numel], kept_codec, held, index)
                values[:numel].mul_(0.5)  # halved so that repeated sums do not overflow

        def native() -> None:
            for numel in sent.numels:
                reduce.native(values[:numel])
                values[:numel].mul_(0.5)

        return native, coded

    return trial


@dataclass(frozen=True)
class _Reduce:
    """Reduction of one message of ``sent``, native or with a codec."""

    sent: StepTraffic
    where: TrialGroup

    def native(self, values: torch.Tensor) -> None:
        group = self.where.group
        share = values.numel() // group.size
        if self.sent.how == "scatter" and share:
            whole = values[: share * group.size]
            reduce_scatter_single(values.new_empty(share), whole, group=group.process_group)
        else:
            dist.all_reduce(values, group=group.process_group)

    def coded(
        self,
        values: torch.Tensor,
        codec: Codec,
        held: tuple[Residual | None, Residual | None],
        index: int,
    ) -> None:
        group, (residual, owner) = self.where.group, held
        how = Reduction(codec, group, Meter(), (), residual, owner)
        if self.sent.how == "own":
            collectives.reduce_to_owners(values, self._owners(index), how)
        elif self.sent.how == "scatter":
            shards = [values[slice(*edges)] for edges in chunk_ranges(values.numel(), group.size)]
            lengths = [shards[rank].numel() for rank in group.receivers]
            rows = None if residual is None else split(residual, lengths)
            collectives.reduce_scatter(shards, Reduction(codec, group, Meter()), rows).wait()
        else:
            collectives.all_reduce(values, how)

    def _owners(self, index: int) -> list[OwnedRange]:
        """Return the owners of message ``index``: each rank owns one range of the step's values."""
        world_size = self.where.group.size
        first, numel = sum(self.sent.numels[:index]), self.sent.numels[index]
        return [
            OwnedRange(max(start, first) - first, min(stop, first + numel) - first, (rank,))
            for rank, (start, stop) in enumerate(chunk_ranges(self.sent.numel, world_size))
            if max(start, first) < min(stop, first + numel)
        ]


def _residual_lengths(numel: int, sent: StepTraffic, where: TrialGroup) -> tuple[int, int]:
    """Return the lengths of this rank's residuals for a message: as sender, and as owner."""
    group = where.group
    if sent.how == "scatter":
        edges = chunk_ranges(numel, group.size)
        return sum(edges[rank][1] - edges[rank][0] for rank in group.receivers), 0
    low, high = chunk_ranges(numel, group.width)[group.local]
    start, stop = chunk_ranges(high - low, group.encoders)[group.index]
    return high - low, stop - start


def _residuals(sent: StepTraffic, where: TrialGroup, bits: int) -> tuple[Residual, Residual]:
    """Allocate zeros as long as the longest residuals of the messages."""
    sender, owner = map(
        max, zip(*(_residual_lengths(n, sent, where) for n in set(sent.numels)), strict=True)
    )
    return zeros(bits, sender, where.device), zeros(bits, owner, where.device)


def _cut_residuals(
    kept: tuple[Residual, Residual], numel: int, sent: StepTraffic, where: TrialGroup
) -> tuple[Residual, Residual]:
    sender, owner = _residual_lengths(numel, sent, where)
    return kept[0][:sender], kept[1][:owner]
