"""Low-rank reductions of a channel: which stretches are matrices, and where the next step begins.

Error feedback is always on: what a step leaves out comes with the next. The residuals are those of
every other codec, by parameter; the right factors, with which a power iteration begins, stand here,
and both are in the checkpoint. Hierarchy changes nothing: factors are summed natively over the
whole group, and such sums know their nodes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.error_feedback import Piece, Residuals
from hybridcomp.codecs import PowerSgd
from hybridcomp.collectives import Handle, Meter, OwnedRange, ReduceScatterHandle
from hybridcomp.collectives.low_rank import Matrix, Measure, low_rank_sum
from hybridcomp.collectives.wire.clock import HOST, Clock
from hybridcomp.collectives.wire.handle import Pending, Steps


@dataclass
class Factors:
    """What one engine on this rank knows of its matrices."""

    #: (rows, columns) of parameters with two dimensions or more, by name
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: right factors by key of the matrix; equal on all ranks that reduce it together
    warm: dict[str, Tensor] = field(default_factory=dict)

    def learn(self, name: str, shape: Sequence[int]) -> None:
        """Note the shape of a parameter: its first dimension counts rows."""
        if len(shape) >= 2:
            self.shapes[name] = (shape[0], math.prod(shape[1:]))

    def matrices(self, pieces: Sequence[Piece], codec: PowerSgd) -> list[Matrix]:
        """The matrices in the flat tensor that ``pieces`` cover, as far as factors are smaller.

        Of a parameter that was cut the whole rows are one; what is left of others is in none.
        """
        found, position = [], 0
        for piece in _joined(pieces):
            _, columns = self.shapes.get(piece.name, (0, 0))
            if columns:
                low = -(-piece.offset // columns)
                rows = (piece.offset + piece.numel) // columns - low
                if rows > 0 and codec.worthwhile(rows, columns):
                    start = position + low * columns - piece.offset
                    found.append(Matrix(f"{piece.name}[{low}:{low + rows}]", start, rows, columns))
            position += piece.numel
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The right factors on the CPU."""
        return {key: basis.cpu().clone() for key, basis in self.warm.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Begin with these right factors; replaces all."""
        self.warm = {key: basis.clone() for key, basis in state.items()}


@dataclass(frozen=True)
class Place:
    """Where a low-rank reduction takes place, and with what."""

    group: dist.ProcessGroup | None
    remote: frozenset[int]  # group ranks on other nodes
    residuals: Residuals
    factors: Factors
    measure: Measure | None = None
    clock: Clock = HOST
    where: str = ""  # as of ``sums.Spot``

    def meter(self) -> Meter:
        """Of a message."""
        return Meter(remote=self.remote, clock=self.clock, where=self.where)

    def sum(
        self,
        values: Tensor,
        codec: PowerSgd,
        pieces: Sequence[Piece] | None,
        meter: Meter,
        needed: Sequence[tuple[int, int]] | None = None,
    ) -> Steps[Tensor]:
        """``low_rank_sum`` of what ``pieces`` cover; exact where they are not known."""
        known = pieces or [Piece("", 0, values.numel())]
        world_size = dist.get_world_size(self.group)
        meter.use(codec.spec)
        return low_rank_sum(
            values,
            self.factors.matrices(known, codec),
            codec.rank,
            self.group,
            meter=meter,
            residual=self.residuals.get("sender", known, world_size, values, last=True),
            warm=self.factors.warm,
            needed=needed,
            measure=self.measure,
        )


def all_reduce(
    tensor: Tensor, codec: PowerSgd, place: Place, pieces: Sequence[Piece] | None, async_op: bool
) -> tuple[Handle, Meter]:
    """Sum ``tensor`` (1-D, contiguous) in place."""
    meter = place.meter()

    def steps() -> Steps[None]:
        tensor.copy_((yield from place.sum(tensor, codec, pieces, meter)))

    return Handle(steps(), meter, async_op), meter


def reduce_scatter(
    shards: Sequence[Tensor],
    codec: PowerSgd,
    place: Place,
    pieces: Sequence[Sequence[Piece]] | None,
    async_op: bool,
) -> tuple[ReduceScatterHandle, Meter]:
    """The sum of the shard of this rank; matrices may reach over several shards."""
    meter = place.meter()
    flat = None if pieces is None else [piece for shard in pieces for piece in shard]
    rank = dist.get_rank(place.group)
    start = sum(shard.numel() for shard in shards[:rank])
    stop = start + shards[rank].numel()

    def steps() -> Steps[Tensor]:
        values = torch.cat(list(shards))
        total = yield from place.sum(values, codec, flat, meter, [(start, stop)])
        return total[start:stop].clone()

    return ReduceScatterHandle(steps(), meter, async_op), meter


def reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    codec: PowerSgd,
    place: Place,
    pieces: Sequence[Piece] | None,
) -> tuple[list[Tensor], Meter]:
    """The sums of the ranges that this rank owns: all ranks get the factors, owners multiply."""
    meter = place.meter()
    rank = dist.get_rank(place.group)
    own = [(part.start, part.stop) for part in ranges if rank in part.ranks]
    total = Pending(place.sum(tensor, codec, pieces, meter, own), meter, False).wait()
    return [total[start:stop] for start, stop in own], meter


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours that continue each other as one: buckets are cut where owners change."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and piece.name == last.name and piece.offset == last.offset + last.numel:
            joined[-1] = Piece(last.name, last.offset, last.numel + piece.numel)
        else:
            joined.append(piece)
    return joined
