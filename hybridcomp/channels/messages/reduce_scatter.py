"""Reduce-scatter: sum shards over the ranks; each rank gets the sum of its own shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels.channel import Channel, Handling, Message
from hybridcomp.channels.messages.all_reduce import WEIGHED, low_rank_of, probe_of, take_common
from hybridcomp.channels.residuals import low_rank
from hybridcomp.channels.residuals.pieces import Piece, borders
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BLOCK, Residual, split
from hybridcomp.collectives import (
    Group,
    ReduceScatterHandle,
    Reduction,
    Shards,
    Transfer,
    native_nbytes,
)


@dataclass(eq=False, kw_only=True)
class ReduceScatter(Message[ReduceScatterHandle]):
    """Sum this rank's shard over ``group``; the handle's ``wait()`` returns a new fp32 tensor.

    Attributes:
        shards: this rank's addend for each rank's shard, 1-D contiguous, or ``Shards`` if they are
            one tensor; a subclass may make them in ``load`` instead.
        parameters: the result of ``pieces``, if the seam already has it.
        async_op: return before the sum is complete.
        shape: set by ``send``: nodes and ranks per node if ``load`` may return shards in that
            order (``Shards.shape``), which spares a copy; else empty.
    """

    shards: Sequence[Tensor] = ()
    parameters: Sequence[Sequence[Piece]] | None = None
    async_op: bool = False
    shape: tuple[int, ...] = field(init=False, default=())

    def load(self, codec: Codec) -> Sequence[Tensor]:
        """Return the shards that are encoded with ``codec``, one for each rank."""
        return self.shards

    def pieces(self) -> Sequence[Sequence[Piece]] | None:
        """Return the parameters that make up each shard, in order; None: unknown."""
        return self.parameters

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of a ring reduce-scatter of all shards."""
        return native_nbytes.reduce_scatter_nbytes(self.numel, self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> ReduceScatterHandle:
        """Sum the loaded shards; see ``collectives.reduce_scatter``."""
        handling, known, sums = channel.handling(codec), channel.group(self.group), None
        if self.crosses is not None and channel.state.config.dp.accumulate == "node":
            sums = channel.state.node_sums if channel.accumulates(self) else None
        by_rank = sums is not None or handling.common or codec.low_rank is not None
        if known.levels is not None and not by_rank and not known.levels.parts:
            self.shape = known.levels.shape
        shards = self.load(codec)
        pieces = self.pieces() if handling.by_parameter or sums is not None else None
        like = shards.flat if isinstance(shards, Shards) else shards[0]
        meter = channel.meter(like.device)
        kept: Tensor | None = None
        if sums is not None and pieces is not None:
            if not self.crosses:
                return self._keep(channel, Transfer(codec, known, meter), shards, pieces)
            kept = None if handling.common else sums.take(pieces, known)
            if kept is None and sums.holds(pieces):
                shards, flat = _wide(shards)
                sums.put_back(pieces, flat)
        exact = None
        if handling.common and pieces is not None:
            exact = take_common(channel, shards, pieces, known, meter)
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), low_rank_of(channel, self.direction)
            handle = low_rank.reduce_scatter(shards, via, factors, pieces, self.async_op)
        else:
            how = Reduction(codec, known, meter, flush=handling.flush, kept=kept)
            handle = self._scatter(channel, shards, how, pieces, handling)
        if exact is not None:
            handle.then(lambda: exact.put(handle.wait(), known.rank))
        nbytes = self.native_nbytes(known.size)
        return channel.recorded(handle, meter, nbytes, self.direction, known.ring)

    def _keep(
        self,
        channel: Channel,
        via: Transfer,
        shards: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]],
    ) -> ReduceScatterHandle:
        """Sum ``shards`` inside the node and keep the sum; the handle returns zeros."""
        group, meter = via.group, via.meter
        like = shards.flat if isinstance(shards, Shards) else shards[0]
        total = channel.state.node_sums.room(
            pieces, group, lambda: [one for rank in group.receivers for one in pieces[rank]], like
        )
        handle = collectives.keep_shards(shards, via, total, self.async_op)
        nbytes = self.native_nbytes(group.size)
        return channel.recorded(handle, meter, nbytes, self.direction, group.ring)

    def _scatter(
        self,
        channel: Channel,
        shards: Sequence[Tensor],
        how: Reduction,
        pieces: Sequence[Sequence[Piece]] | None,
        handling: Handling,
    ) -> ReduceScatterHandle:
        """Reduce-scatter ``shards``, with residuals for those that this rank encodes."""
        group = how.group
        cuts: list[list[int]] | None = None
        residuals: Sequence[Residual] | None = None
        if pieces is not None and handling.separate:
            cuts = [borders(pieces[rank]) for rank in group.receivers]
        if pieces is not None and handling.feeds_back:
            residuals = _scattered(channel, shards, pieces, group)
        if handling.sampling:
            (first,) = how.codec.split_error_budget(1, group.encoders, exact=1)
            how.probe = probe_of(channel, first, self.direction)
        return collectives.reduce_scatter(shards, how, residuals, cuts, self.async_op)


def _wide(shards: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
    """Copy ``shards`` as fp32; return the copies, and the one tensor of which they are views."""
    if isinstance(shards, Shards):
        flat = shards.flat.to(torch.float32, copy=True)
        return Shards(flat, shards.numel), flat
    flat = torch.cat([shard.to(torch.float32) for shard in shards])
    return torch.split(flat, [shard.numel() for shard in shards]), flat


def _scattered(
    channel: Channel, shards: Sequence[Tensor], pieces: Sequence[Sequence[Piece]], group: Group
) -> Sequence[Residual]:
    """Return the residuals of the shards that this rank encodes.

    Residuals of few bits start at block borders, since only then codec kernels can write them.
    """
    held = channel.state.residuals
    key = ("shards", id(pieces), held.bits)
    known: _ShardPieces | None = group.plans.get(key)
    if known is None:
        known = _shard_pieces(pieces, group, BLOCK if held.bits != 32 else 1)
        if isinstance(pieces, tuple):
            group.keep(key, known, 1 + (len(known.flat) + len(known.whole)) // WEIGHED)
    like = shards.flat if isinstance(shards, Shards) else shards[0]
    found = held.get("sender", known.flat, like, last=True, message=known.whole)
    if isinstance(shards, Shards) and isinstance(found, Tensor):
        return Shards(found, shards.numel)
    if isinstance(found, Tensor):
        return list(torch.split(found, known.numels)[::2])
    return split(found, known.numels)[::2]


class _ShardPieces(NamedTuple):
    """Pieces of a reduce-scatter in the order of one residual.

    Attributes:
        held: the pieces by rank, kept alive because their id is the cache key.
        flat: pieces of the shards that this rank encodes, with a gap behind each shard.
        whole: in two levels, pieces of all shards.
        numels: elements of each shard in ``flat``, and of the gap behind it.
    """

    held: Sequence[Sequence[Piece]]
    flat: tuple[Piece, ...]
    whole: tuple[Piece, ...]
    numels: list[int]


def _shard_pieces(pieces: Sequence[Sequence[Piece]], group: Group, block: int) -> _ShardPieces:
    flat, numels = list[Piece](), list[int]()
    for rank in group.receivers:
        numel = sum(piece.numel for piece in pieces[rank])
        gap = -numel % block
        flat += [*pieces[rank], *([Piece("", 0, gap)] if gap else [])]
        numels += [numel, gap]
    whole = tuple(piece for row in pieces for piece in row) if group.levels else ()
    return _ShardPieces(pieces, tuple(flat), whole, numels)
