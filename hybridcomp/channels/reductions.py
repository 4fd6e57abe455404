"""The reductions of a channel: which residuals they take, in one level or in two.

In two levels what is encoded is the sum of a node, cut into a stretch for each of its ranks. So a
residual covers only this rank's stretch, and a sum of residuals that was loaded from another job is
shared among the nodes, not among all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels import low_rank as factors
from hybridcomp.channels.error_feedback import Hop, Piece, Residuals, borders, cut
from hybridcomp.channels.low_rank import Factors, Place
from hybridcomp.codecs import PowerSgd
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import (
    Handle,
    Levels,
    Meter,
    OwnedRange,
    ReduceScatterHandle,
    all_reduce_codecs,
    chunk_ranges,
    plan_reduction,
)
from hybridcomp.collectives.hierarchical import owners, two_levels
from hybridcomp.collectives.low_rank import Measure
from hybridcomp.collectives.wire.clock import HOST, Clock

#: is shown what is about to be encoded, with which codec, where that may not reach across, and
#: the residual of the same values
Probe = Callable[[Tensor, Codec, Sequence[int], Tensor | None], None]


@dataclass(frozen=True)
class Spot:
    """Where a reduction takes place, and with what."""

    group: dist.ProcessGroup | None
    levels: Levels | None  # None: one level
    remote: frozenset[int]  # group ranks on other nodes
    residuals: Residuals | None  # None: no error feedback
    probe: Probe
    factors: Factors
    measure: Measure | None  # of low-rank sums; None: this step takes no sample
    apart: bool = False  # parameters are encoded one by one, whatever the codec
    clock: Clock = HOST
    where: str = ""  # which messages, for an error about one

    @property
    def encoders(self) -> int:
        """Ranks that encode one element and keep a residual of it."""
        return dist.get_world_size(self.group) if self.levels is None else self.levels.nodes

    @property
    def index(self) -> int:
        """Which of the encoders this rank is."""
        return dist.get_rank(self.group) if self.levels is None else self.levels.node

    def meter(self) -> Meter:
        """Of a message; in two levels all other encoders are on other nodes."""
        nodes = self.levels.nodes if self.levels is not None else 0
        remote = frozenset(range(nodes)) if nodes else self.remote
        return Meter(remote=remote, clock=self.clock, where=self.where)

    def low_rank(self) -> Place:
        """The same spot for factors, which are summed over all ranks at once."""
        assert self.residuals is not None, "low rank without error feedback"
        return Place(
            self.group,
            self.remote,
            self.residuals,
            self.factors,
            self.measure,
            self.clock,
            self.where,
        )

    def within(self, numel: int) -> tuple[int, int]:
        """``[start, stop)`` of a message that this rank encodes."""
        return (0, numel) if self.levels is None else two_levels.stretch(numel, self.levels)

    def cuts(self, codec: Codec, pieces: Sequence[Piece] | None) -> list[int]:
        """Where ``codec`` may not reach across, in what this rank encodes."""
        if pieces is None or not self.separates(codec):
            return []
        return borders(cut(pieces, *self.within(sum(piece.numel for piece in pieces))))

    def separates(self, codec: Codec) -> bool:
        """Whether what is made of a parameter must not depend on its neighbours in the message."""
        return codec.bounded or (self.apart and not codec.lossless)

    def shows(
        self,
        codec: Codec,
        cuts: Sequence[int],
        hops: int,
        result: torch.dtype,
        residual: Tensor | None,
    ) -> Callable[[Tensor], None]:
        """What to call with the values of the first of ``hops`` quantizations."""
        first = codec.hops(hops, self.encoders, result=result, exact=1)[0]
        return lambda values: self.probe(values, first, cuts, residual)

    def feedback(self, pieces: Sequence[Piece] | None, like: Tensor) -> Feedback:
        """The residuals of a message that consists of ``pieces``."""
        return Feedback(self, None if self.residuals is None else pieces, like)


@dataclass(frozen=True)
class Feedback:
    """The residuals of one flat message; None without error feedback."""

    spot: Spot
    pieces: Sequence[Piece] | None
    like: Tensor

    def hops(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        """The residuals of the sender and, of two hops, of the owner."""
        if self.pieces is None or self.spot.residuals is None:
            return None, None
        return self._sender(last=count == 1), self._owner() if count == 2 else None

    def _sender(self, last: bool) -> Tensor | None:
        """What was left out of this rank's values, or of its stretch of the node's sum."""
        return self._get("sender", self._own(), last)

    def _owner(self) -> Tensor | None:
        """What was left out of the sum that this rank encodes again, its chunk of all."""
        own = self._own()
        numel = sum(piece.numel for piece in own)
        chunks = chunk_ranges(numel, self.spot.encoders)
        return self._get("owner", cut(own, *chunks[self.spot.index]), last=False)

    def _own(self) -> list[Piece]:
        pieces = self.pieces or ()
        return cut(pieces, *self.spot.within(sum(piece.numel for piece in pieces)))

    def _get(self, hop: Hop, pieces: Sequence[Piece], last: bool) -> Tensor | None:
        if self.pieces is None or self.spot.residuals is None:
            return None
        return self.spot.residuals.get(hop, pieces, self.spot.encoders, self.like, last=last)


def all_reduce(
    tensor: Tensor, codec: Codec, spot: Spot, pieces: Sequence[Piece] | None, async_op: bool
) -> tuple[Handle, Meter]:
    """Sum ``tensor`` in place."""
    if isinstance(codec, PowerSgd):
        return factors.all_reduce(tensor, codec, spot.low_rank(), pieces, async_op)
    feedback, meter = spot.feedback(pieces, tensor), spot.meter()
    cuts = spot.cuts(codec, pieces)
    codecs = all_reduce_codecs(codec, tensor.dtype, spot.encoders, tensor.device, cuts)
    residual, owner = feedback.hops(len(codecs))

    def probe(values: Tensor) -> None:
        spot.probe(values, codecs[0], cuts, residual)

    if spot.levels is not None:
        handle = two_levels.all_reduce(
            tensor,
            codec,
            spot.levels,
            meter=meter,
            residual=residual,
            owner_residual=owner,
            cuts=cuts,
            probe=probe,
            async_op=async_op,
        )
    else:
        probe(tensor)
        handle = collectives.all_reduce(
            tensor,
            codec,
            spot.group,
            meter=meter,
            residual=residual,
            owner_residual=owner,
            cuts=cuts,
            async_op=async_op,
        )
    return handle, meter


def reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    spot: Spot,
    pieces: Sequence[Sequence[Piece]] | None,
    async_op: bool,
) -> tuple[ReduceScatterHandle, Meter]:
    """The sum of the shard of this rank; ``shards`` and ``pieces`` by group rank."""
    if isinstance(codec, PowerSgd):
        return factors.reduce_scatter(shards, codec, spot.low_rank(), pieces, async_op)
    meter, levels = spot.meter(), spot.levels
    encoded = range(len(shards)) if levels is None else [row[levels.local] for row in levels.grid]
    cuts = None
    if pieces is not None and spot.separates(codec):
        cuts = [borders(pieces[rank]) for rank in encoded]
    residual = residuals = None
    if pieces is not None and spot.residuals is not None:
        flat = [piece for rank in encoded for piece in pieces[rank]]
        residual = spot.residuals.get("sender", flat, spot.encoders, shards[0], last=True)
        residuals = list(torch.split(residual, [shards[rank].numel() for rank in encoded]))
    if levels is not None:
        handle = two_levels.reduce_scatter(
            shards,
            codec,
            levels,
            meter=meter,
            residuals=residuals,
            cuts=cuts,
            probe=spot.shows(codec, (), 1, torch.float32, residual),
            async_op=async_op,
        )
    else:
        longest = max(range(len(shards)), key=lambda rank: shards[rank].numel())
        shown = cuts[longest] if cuts else ()
        held = residuals[longest] if residuals is not None else None
        spot.shows(codec, shown, 1, torch.float32, held)(shards[longest])
        handle = collectives.reduce_scatter(
            shards,
            codec,
            spot.group,
            meter=meter,
            residuals=residuals,
            cuts=cuts,
            async_op=async_op,
        )
    return handle, meter


def reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    codec: Codec,
    spot: Spot,
    pieces: Sequence[Piece] | None,
) -> tuple[list[Tensor], Meter]:
    """The sums of the ranges that this rank owns."""
    if isinstance(codec, PowerSgd):
        return factors.reduce_to_owners(tensor, ranges, codec, spot.low_rank(), pieces)
    feedback, meter, levels = spot.feedback(pieces, tensor), spot.meter(), spot.levels
    planned = ranges
    if levels is not None:
        planned = owners.ranges_of_nodes(ranges, spot.within(tensor.numel()), levels)
    balanced = plan_reduction(planned, spot.encoders) == "balanced"
    hops = 2 if balanced else 1
    residual, owner = feedback.hops(hops)
    cuts = spot.cuts(codec, pieces)
    probe = spot.shows(codec, cuts, hops, torch.float32, residual)
    if levels is not None:
        sums = owners.reduce_to_owners(
            tensor,
            ranges,
            codec,
            levels,
            meter=meter,
            residual=residual,
            owner_residual=owner,
            cuts=cuts,
            probe=probe,
        )
    else:
        probe(tensor)
        sums = collectives.reduce_to_owners(
            tensor,
            ranges,
            codec,
            spot.group,
            meter=meter,
            residual=residual,
            owner_residual=owner,
            cuts=cuts,
        )
    return sums, meter
