"""Reduce a channel's tensors by low-rank factors: find the matrices in them, keep right factors.

Error feedback is always on: the error of a step is added to the next. Residuals are kept by
parameter, as for every other codec. The right factors, from which the next power iteration starts,
are kept here. Both are in the checkpoint. ``hierarchy`` has no effect: factors are summed natively
over the whole group, and NCCL handles nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.channels.residuals.error_feedback import Residuals
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.low_rank import LowRank
from hybridcomp.codecs.quantized_residual import QuantizedResidual, as_fp32
from hybridcomp.collectives import Handle, OwnedRange, ReduceScatterHandle, Reduction, Transfer
from hybridcomp.collectives.low_rank import Factoring, Matrix, Measure, low_rank_sum
from hybridcomp.collectives.wire.handle import Pending, Steps


@dataclass
class Factors:
    """Shapes and right factors of the matrices of one engine on this rank."""

    #: (rows, columns) of parameters with two dimensions or more, by name
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: right factors by key of the matrix; equal on all ranks that reduce it together
    warm: dict[str, Tensor] = field(default_factory=dict)

    def learn(self, name: str, shape: Sequence[int]) -> None:
        """Record the shape of a parameter as a matrix: rows are its first dimension."""
        if len(shape) >= 2:
            self.shapes[name] = (shape[0], math.prod(shape[1:]))

    def matrices(self, pieces: Sequence[Piece], low_rank: LowRank) -> list[Matrix]:
        """Find the matrices in the flat tensor of ``pieces`` for which factors are smaller.

        The complete rows of a cut parameter form one matrix; partial rows belong to none.
        """
        found, position = [], 0
        for piece in _joined(pieces):
            _, columns = self.shapes.get(piece.name, (0, 0))
            if columns:
                low = -(-piece.offset // columns)
                rows = (piece.offset + piece.numel) // columns - low
                if rows > 0 and low_rank.worthwhile(rows, columns):
                    start = position + low * columns - piece.offset
                    found.append(Matrix(f"{piece.name}[{low}:{low + rows}]", start, rows, columns))
            position += piece.numel
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return the right factors on the CPU."""
        return {key: basis.cpu().clone() for key, basis in self.warm.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all right factors by those in ``state``."""
        self.warm = {key: basis.clone() for key, basis in state.items()}


@dataclass(frozen=True)
class Factored:
    """Residuals, factors and error sampler of the low-rank sums of one engine.

    ``measure``: records a sample of the error; None in steps that take no sample.
    """

    residuals: Residuals
    factors: Factors
    measure: Measure | None = None

    def sum(
        self,
        values: Tensor,
        via: Transfer,
        pieces: Sequence[Piece] | None,
        needed: Sequence[tuple[int, int]] | None = None,
    ) -> Steps[Tensor]:
        """Sum ``values`` by ``low_rank_sum``; exactly where ``pieces`` is None."""
        kind, known = via.codec.low_rank, pieces or [Piece("", 0, values.numel())]
        assert kind is not None, "a codec that is not of low rank"
        via.meter.used[kind.spec] = None
        residual = self.residuals.get("sender", known, values, last=True)
        matrices = self.factors.matrices(known, kind)
        factoring = Factoring(matrices, kind.rank, self.factors.warm, needed, self.measure)
        wide = as_fp32(residual)
        how = Reduction(via.codec, via.group, via.meter, residual=wide)
        total = yield from low_rank_sum(values, factoring, how)
        if isinstance(residual, QuantizedResidual):
            residual.pack(wide)
        return total


def all_reduce(
    tensor: Tensor,
    via: Transfer,
    factored: Factored,
    pieces: Sequence[Piece] | None,
    async_op: bool,
) -> Handle:
    """Sum ``tensor`` (1-D, contiguous) in place."""

    def steps() -> Steps[None]:
        tensor.copy_((yield from factored.sum(tensor, via, pieces)))

    return Handle(steps(), via.meter, async_op)


def reduce_scatter(
    shards: Sequence[Tensor],
    via: Transfer,
    factored: Factored,
    pieces: Sequence[Sequence[Piece]] | None,
    async_op: bool,
) -> ReduceScatterHandle:
    """Sum this rank's shard; a matrix may extend over several shards."""
    flat = None if pieces is None else [piece for shard in pieces for piece in shard]
    rank = via.group.rank
    start = sum(shard.numel() for shard in shards[:rank])
    stop = start + shards[rank].numel()

    def steps() -> Steps[Tensor]:
        values = torch.cat(list(shards))
        total = yield from factored.sum(values, via, flat, [(start, stop)])
        return total[start:stop].clone()

    return ReduceScatterHandle(steps(), via.meter, async_op)


def reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    via: Transfer,
    factored: Factored,
    pieces: Sequence[Piece] | None,
) -> list[Tensor]:
    """Sum the ranges that this rank owns: all ranks get the factors, only owners multiply them."""
    own = [(part.start, part.stop) for part in ranges if via.group.rank in part.ranks]
    total = Pending(factored.sum(tensor, via, pieces, own), via.meter, False).wait()
    return [total[start:stop] for start, stop in own]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join adjacent pieces of a parameter; buckets are split where owners change."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and piece.name == last.name and piece.offset == last.offset + last.numel:
            joined[-1] = Piece(last.name, last.offset, last.numel + piece.numel)
        else:
            joined.append(piece)
    return joined
