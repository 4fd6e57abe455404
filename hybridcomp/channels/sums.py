"""Messages that are summed: all-reduce, reduce-scatter, and sums to the owners of ranges.

Error feedback adds residuals before it encodes. In two levels the sum of a node is encoded, cut
into one stretch for each of its ranks. So a residual covers only this rank's stretch, which
``Group`` gives. After a change of ranks those of a node hold residuals in common; the pieces of the
whole message show which of them the others take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels import low_rank
from hybridcomp.channels.channel import Channel, Handling, Message, R
from hybridcomp.channels.error_feedback import Withheld
from hybridcomp.channels.low_rank import Factored
from hybridcomp.channels.pieces import Piece, borders, cut
from hybridcomp.channels.replicated import UncompressedParams, stretches_of
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BLOCK, Residual, split
from hybridcomp.collectives import (
    Group,
    Handle,
    Meter,
    OwnedRange,
    Probe,
    ReduceScatterHandle,
    Reduction,
    Shards,
    Transfer,
    all_reduce_codecs,
    chunk_ranges,
    native_nbytes,
    owner_hops,
)
from hybridcomp.policy import Direction

#: pieces that one rank encodes, and of these the ones whose sum it owns
PartsOfRank = tuple[tuple[Piece, ...], tuple[Piece, ...]]
#: pieces that count as much as a plan, of what a group keeps: they are references to what is there
WEIGHED = 64


@dataclass(eq=False, kw_only=True)
class Sum(Message[R]):
    """A sum over ``group`` of a tensor that consists of parameters' gradients, or of activations.

    A seam that must prepare the tensor, or find out which parameters it holds, makes a subclass.
    ``load`` runs only where there is a codec, ``pieces`` only where something asks for them: error
    feedback, a bound, or parameters that tensor-parallel ranks have in common.

    Attributes:
        values: 1-D contiguous fp32/bf16/fp16; a subclass may make them in ``load`` instead.
        parameters: what ``pieces`` returns, where a seam has it at hand.
    """

    values: Tensor | None = None
    parameters: Sequence[Piece] | None = None

    def load(self, codec: Codec) -> Tensor:
        """Return the tensor that is encoded with ``codec``."""
        assert self.values is not None, "give values, or override load"
        return self.values

    def pieces(self) -> Sequence[Piece] | None:
        """Return the parameters that the values consist of, in order; None: not known."""
        return self.parameters


@dataclass(eq=False, kw_only=True)
class AllReduce(Sum[Handle]):
    """Sum the values over ``group`` in place.

    Attributes:
        async_op: return before the sum is complete; the handle's ``wait()`` completes it.
    """

    async_op: bool = False

    def taken(self) -> Mapping[str, Tensor] | None:
        """Return by name of ``pieces`` whether upstream takes that sum or throws it away.

        Bool () on the device of the values. The residual of a sum that is thrown away waits for a
        message that counts. Sums of other names are taken; None: all are.
        """
        return None

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of a ring all-reduce."""
        return native_nbytes.all_reduce_nbytes(self.numel, self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Sum the loaded tensor over ``group`` in place; see ``collectives.all_reduce``."""
        tensor, handling = self.load(codec), channel.handling(codec)
        pieces = self.pieces() if handling.by_parameter else None
        known, meter = channel.group_and_meter(self.group, tensor.device)
        exact = None
        if handling.common and pieces is not None:
            exact = _take(channel, [tensor], [pieces], known, meter)
        taken = self.taken()
        kept = Withheld(taken) if taken and channel.error_feedback else None
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), _low_rank(channel, self.direction)
            if kept is not None and pieces is not None:
                held = channel.state.residuals.get("sender", pieces, tensor, last=True)
                kept.take(held, pieces)
            handle = low_rank.all_reduce(tensor, via, factors, pieces, self.async_op)
        else:
            how = Reduction(codec, known, meter, flush=handling.flush)
            if pieces is not None or handling.sampling:
                _watch(channel, how, tensor, pieces, self.direction, handling)
            if kept is not None and pieces is not None:
                own, chunk = _parts(pieces, known)
                kept.take(how.residual, own)
                kept.take(how.owner_residual, chunk)
            handle = collectives.all_reduce(tensor, how, self.async_op)
        if kept is not None:
            handle.then(kept.give_back)
        if exact is not None:
            handle.then(lambda: exact.put(tensor))
        nbytes = self.native_nbytes(known.size)
        return channel.recorded(handle, meter, nbytes, self.direction, known.ring)


@dataclass(eq=False, kw_only=True)
class ReduceScatter(Message[ReduceScatterHandle]):
    """Sum this rank's shard over ``group``; ``wait()`` of the handle gives it, a new fp32 tensor.

    Attributes:
        shards: this rank's part of each rank's sum, 1-D contiguous, ``Shards`` where they are one
            tensor; a subclass may make them in ``load`` instead.
        parameters: what ``pieces`` returns, where a seam has it at hand.
        async_op: return before the sum is complete.
    """

    shards: Sequence[Tensor] = ()
    parameters: Sequence[Sequence[Piece]] | None = None
    async_op: bool = False

    def load(self, codec: Codec) -> Sequence[Tensor]:
        """Return the shards that are encoded with ``codec``, one for each rank."""
        return self.shards

    def pieces(self) -> Sequence[Sequence[Piece]] | None:
        """Return the parameters that each shard consists of, in order; None: not known."""
        return self.parameters

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of a ring reduce-scatter of all shards."""
        return native_nbytes.reduce_scatter_nbytes(self.numel, self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> ReduceScatterHandle:
        """Sum the loaded shards; see ``collectives.reduce_scatter``."""
        shards, handling = self.load(codec), channel.handling(codec)
        pieces = self.pieces() if handling.by_parameter else None
        like = shards.flat if isinstance(shards, Shards) else shards[0]
        known, meter = channel.group_and_meter(self.group, like.device)
        exact = None
        if handling.common and pieces is not None:
            exact = _take(channel, shards, pieces, known, meter)
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), _low_rank(channel, self.direction)
            handle = low_rank.reduce_scatter(shards, via, factors, pieces, self.async_op)
        else:
            how = Reduction(codec, known, meter, flush=handling.flush)
            handle = self._scatter(channel, shards, how, pieces, handling)
        if exact is not None:
            handle.then(lambda: exact.put(handle.wait(), known.rank))
        nbytes = self.native_nbytes(known.size)
        return channel.recorded(handle, meter, nbytes, self.direction, known.ring)

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
        if pieces is not None and channel.error_feedback:
            residuals = _scattered(channel, shards, pieces, group)
        if handling.sampling:
            (first,) = how.codec.split_error_budget(1, group.encoders, exact=1)
            how.probe = _probe(channel, first, self.direction)
        return collectives.reduce_scatter(shards, how, residuals, cuts, self.async_op)


@dataclass(eq=False, kw_only=True)
class ReduceToOwners(Sum[list[Tensor]]):
    """Sum a tensor over ``group`` and keep the ranges that this rank owns: fp32, complete.

    Attributes:
        ranges: which ranks own which elements; together they are the tensor.
    """

    ranges: Sequence[OwnedRange]

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the all-reduce by which upstream does it."""
        return native_nbytes.all_reduce_nbytes(self.numel, self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> list[Tensor]:
        """Sum the loaded tensor to its owners; see ``collectives.reduce_to_owners``."""
        tensor, ranges, handling = self.load(codec), self.ranges, channel.handling(codec)
        pieces = self.pieces() if handling.by_parameter else None
        known, meter = channel.group_and_meter(self.group, tensor.device)
        exact = None
        if handling.common and pieces is not None:
            exact = _take(channel, [tensor], [pieces], known, meter)
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), _low_rank(channel, "forward")
            sums = low_rank.reduce_to_owners(tensor, ranges, via, factors, pieces)
        else:
            how = Reduction(codec, known, meter, flush=handling.flush)
            hops = owner_hops(ranges, tensor.numel(), known)
            if pieces is not None and handling.separate:
                how.cuts = borders(_parts(pieces, known)[0])
            if pieces is not None and channel.error_feedback:
                _set_residuals(channel, how, tensor, pieces, hops)
            if handling.sampling:
                first = codec.split_error_budget(hops, known.encoders, exact=1)[0]
                how.probe = _probe(channel, first, "forward")
            sums = collectives.reduce_to_owners(tensor, ranges, how)
        if exact is not None:
            owned = [part for part in ranges if known.rank in part.ranks]
            for part, total in zip(owned, sums, strict=True):
                exact.put(total, start=part.start)
        channel.record(meter, self.native_nbytes(known.size), self.direction, known.ring)
        return sums


def _scattered(
    channel: Channel, shards: Sequence[Tensor], pieces: Sequence[Sequence[Piece]], group: Group
) -> Sequence[Residual]:
    """Return the residuals of the shards that this rank encodes.

    Those of few bits begin between blocks, as only then the kernels of codecs write them.
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
    """The pieces of a reduce-scatter as one residual has them.

    Attributes:
        held: the pieces by rank, for the key.
        flat: those of the shards that this rank encodes, each with a gap behind it.
        whole: in two levels, those of all shards.
        numels: elements of each of these shards, and of its gap.
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


def _watch(
    channel: Channel,
    how: Reduction,
    tensor: Tensor,
    pieces: Sequence[Piece] | None,
    direction: Direction,
    handling: Handling,
) -> None:
    """Set the cuts, residuals and error probe of the all-reduce ``how`` of ``tensor``."""
    if pieces is not None and handling.separate:
        how.cuts = borders(_parts(pieces, how.group)[0])
    codecs = all_reduce_codecs(how.codec, tensor.dtype, how.group.encoders, tensor.device, how.cuts)
    if pieces is not None and channel.error_feedback:
        _set_residuals(channel, how, tensor, pieces, len(codecs))
    if handling.sampling:
        how.probe = _probe(channel, codecs[0], direction)


def _set_residuals(
    channel: Channel, how: Reduction, tensor: Tensor, pieces: Sequence[Piece], hops: int
) -> None:
    """Set the sender's residual and, for two ``hops``, the owner's."""
    held, (own, chunk) = channel.state.residuals, _parts(pieces, how.group)
    whole = pieces if how.group.levels else ()
    if hops == 1:
        how.residual = held.get("sender", own, tensor, last=True, message=whole)
    else:
        how.residual, how.owner_residual = held.pair(own, chunk, tensor, message=whole)


def _take(
    channel: Channel,
    tensors: Sequence[Tensor],
    pieces: Sequence[Sequence[Piece]],
    group: Group,
    meter: Meter,
) -> UncompressedParams | None:
    """Take parameters common to tensor-parallel ranks out of a message; sum them exactly."""
    stretches = stretches_of(pieces, channel.state.common)
    return UncompressedParams(tensors, stretches, group, meter) if stretches else None


def _probe(channel: Channel, first: Codec, direction: Direction) -> Probe:
    """Return a function that samples the error of the first encoding, with codec ``first``."""

    def probe(values: Tensor, cuts: Sequence[int], residual: Residual | None) -> None:
        channel.sample(values, first, direction, cuts, residual=residual)

    return probe


def _low_rank(channel: Channel, direction: Direction) -> Factored:
    """Return the factors and residuals of low-rank sums, and what samples their error."""
    measure = partial(channel.samples.factors, direction) if channel.sampling else None
    return Factored(channel.state.residuals, channel.state.factors, measure)


def _parts(pieces: Sequence[Piece], group: Group) -> PartsOfRank:
    """Return the pieces that this rank encodes, and of these the ones whose sum it owns.

    All of a message, or its stretch of the node's; it encodes the sums of the latter again. For a
    tuple of pieces they are worked out once.
    """
    key = ("parts", id(pieces))
    known: tuple[Sequence[Piece], PartsOfRank] | None = group.plans.get(key)
    if known is not None:
        return known[1]
    numel = sum(piece.numel for piece in pieces)
    start, stop = chunk_ranges(numel, group.width)[group.local]
    own = tuple(cut(pieces, start, stop))
    edges = chunk_ranges(stop - start, group.encoders)[group.index]
    found = own, tuple(cut(own, *edges))
    if isinstance(pieces, tuple):
        group.keep(key, (pieces, found), 1 + len(pieces) // WEIGHED)
    return found
