"""Messages that sum: all-reduce, and sums to the owners of ranges.

Error feedback adds residuals before it encodes. In two levels the sum of a node is encoded in
slices, one by each of its ranks. So a residual covers only this rank's slice, which ``Group``
gives. After a change of ranks the ranks of a node hold residuals in common; the pieces of the whole
message show which of them other ranks use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels.channel import Channel, Message, R
from hybridcomp.channels.residuals import low_rank
from hybridcomp.channels.residuals.deferred_residuals import DeferredResiduals
from hybridcomp.channels.residuals.low_rank import Factored
from hybridcomp.channels.residuals.pieces import Piece, borders, cut
from hybridcomp.channels.residuals.replicated import UncompressedParams, stretches_of
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives import (
    Group,
    Handle,
    Meter,
    OwnedRange,
    Probe,
    Reduction,
    Transfer,
    all_reduce_codecs,
    chunk_ranges,
    native_nbytes,
    owner_hops,
)
from hybridcomp.dimensions import Direction

#: pieces that one rank encodes, and pieces whose sum it owns
PartsOfRank = tuple[tuple[Piece, ...], tuple[Piece, ...]]
#: number of pieces that count as much as a plan in a group's cache: they only refer to existing
#: objects
WEIGHED = 64


@dataclass(eq=False, kw_only=True)
class Sum(Message[R]):
    """A sum over ``group`` of a tensor that consists of parameters' gradients, or of activations.

    A seam that must prepare the tensor, or find out which parameters it holds, defines a subclass.
    ``load`` runs only if there is a codec, ``pieces`` only if they are needed: for error feedback,
    a bound, or parameters that tensor-parallel ranks have in common.

    Attributes:
        values: 1-D contiguous fp32/bf16/fp16; a subclass may make them in ``load`` instead.
        parameters: the result of ``pieces``, if the seam already has it.
    """

    values: Tensor | None = None
    parameters: Sequence[Piece] | None = None

    def load(self, codec: Codec) -> Tensor:
        """Return the tensor that is encoded with ``codec``."""
        assert self.values is not None, "give values, or override load"
        return self.values

    def pieces(self) -> Sequence[Piece] | None:
        """Return the parameters that make up the values, in order; None: unknown."""
        return self.parameters


@dataclass(eq=False, kw_only=True)
class AllReduce(Sum[Handle]):
    """Sum the values over ``group`` in place.

    Attributes:
        async_op: return before the sum is complete; the handle's ``wait()`` completes it.
    """

    async_op: bool = False

    def taken(self) -> Mapping[str, Tensor] | None:
        """Return, by parameter name, whether upstream uses the sum or discards it.

        The flags are bool () on the device of the values. The residual of a discarded sum waits for
        a message whose sum is used. Sums of parameters without a flag are used; None: all are used.
        """
        return None

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of a ring all-reduce."""
        return native_nbytes.all_reduce_nbytes(self.numel, self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Sum the loaded tensor over ``group`` in place; see ``collectives.all_reduce``."""
        tensor, handling = self.load(codec), channel.handling(codec)
        pieces = self.pieces() if handling.by_parameter else None
        known, meter = channel.group(self.group), channel.meter(tensor.device)
        exact = None
        if handling.common and pieces is not None:
            exact = take_common(channel, [tensor], [pieces], known, meter)
        taken = self.taken()
        kept = DeferredResiduals(taken) if taken and channel.error_feedback else None
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), low_rank_of(channel, self.direction)
            if kept is not None and pieces is not None:
                held = channel.state.residuals.get("sender", pieces, tensor, last=True)
                kept.take(held, pieces)
            handle = low_rank.all_reduce(tensor, via, factors, pieces, self.async_op)
        else:
            how = Reduction(codec, known, meter, flush=handling.flush)
            if pieces is not None and handling.separate:
                how.cuts = borders(_parts(pieces, known)[0])
            if pieces is not None or handling.sampling:
                of_values = tensor.dtype, known.encoders, tensor.device
                codecs = all_reduce_codecs(codec, *of_values, how.cuts)
                if pieces is not None and handling.feeds_back:
                    _set_residuals(channel, how, tensor, pieces, len(codecs))
                if handling.sampling:
                    how.probe = probe_of(channel, codecs[0], self.direction)
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
class ReduceToOwners(Sum[list[Tensor]]):
    """Sum a tensor over ``group`` and keep the ranges that this rank owns: fp32, complete.

    Attributes:
        ranges: the ranges and their owners; together they cover the tensor.
    """

    ranges: Sequence[OwnedRange]

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the all-reduce that upstream would use."""
        return native_nbytes.all_reduce_nbytes(self.numel, self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> list[Tensor]:
        """Sum the loaded tensor to its owners; see ``collectives.reduce_to_owners``."""
        tensor, ranges, handling = self.load(codec), self.ranges, channel.handling(codec)
        sums = None
        if self.crosses is not None and channel.state.config.dp.accumulate == "node":
            sums = channel.state.node_sums if channel.accumulates(self) else None
        pieces = self.pieces() if handling.by_parameter or sums is not None else None
        known, meter = channel.group(self.group), channel.meter(tensor.device)
        kept: Tensor | None = None
        if sums is not None and pieces is not None:
            if not self.crosses:
                return self._keep(channel, Transfer(codec, known, meter), tensor, pieces)
            kept = None if handling.common else sums.take(pieces, known)
            if kept is None and sums.holds(pieces):
                tensor = tensor.to(torch.float32, copy=True)
                sums.put_back(pieces, tensor)
        exact = None
        if handling.common and pieces is not None:
            exact = take_common(channel, [tensor], [pieces], known, meter)
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), low_rank_of(channel, "forward")
            owned = low_rank.reduce_to_owners(tensor, ranges, via, factors, pieces)
        else:
            how = Reduction(codec, known, meter, flush=handling.flush, kept=kept)
            hops = owner_hops(ranges, tensor.numel(), known)
            if pieces is not None and handling.separate:
                how.cuts = borders(_parts(pieces, known)[0])
            if pieces is not None and handling.feeds_back:
                _set_residuals(channel, how, tensor, pieces, hops)
            if handling.sampling:
                first = codec.split_error_budget(hops, known.encoders, exact=1)[0]
                how.probe = probe_of(channel, first, "forward")
            owned = collectives.reduce_to_owners(tensor, ranges, how)
        if exact is not None:
            places = [part for part in ranges if known.rank in part.ranks]
            for part, total in zip(places, owned, strict=True):
                exact.put(total, start=part.start)
        channel.record(meter, self.native_nbytes(known.size), self.direction, known.ring)
        return owned

    def _keep(
        self, channel: Channel, via: Transfer, tensor: Tensor, pieces: Sequence[Piece]
    ) -> list[Tensor]:
        """Sum ``tensor`` inside the node and keep the sum; return zeros for this rank's ranges."""
        group, meter = via.group, via.meter
        total = channel.state.node_sums.room(
            pieces, group, lambda: _parts(pieces, group)[0], tensor
        )
        collectives.keep_to_owners(tensor, via, total)
        channel.record(meter, self.native_nbytes(group.size), self.direction, group.ring)
        zero = torch.zeros(1, device=tensor.device, dtype=torch.float32)
        return [
            zero.expand(part.stop - part.start) for part in self.ranges if group.rank in part.ranks
        ]


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


def take_common(
    channel: Channel,
    tensors: Sequence[Tensor],
    pieces: Sequence[Sequence[Piece]],
    group: Group,
    meter: Meter,
) -> UncompressedParams | None:
    """Take parameters common to tensor-parallel ranks out of a message; sum them exactly."""
    stretches = stretches_of(pieces, channel.state.common)
    return UncompressedParams(tensors, stretches, group, meter) if stretches else None


def probe_of(channel: Channel, first: Codec, direction: Direction) -> Probe:
    """Return a function that samples the error of the first encoding, with codec ``first``."""

    def probe(values: Tensor, cuts: Sequence[int], residual: Residual | None) -> None:
        channel.sample(values, first, direction, cuts, residual=residual)

    return probe


def low_rank_of(channel: Channel, direction: Direction) -> Factored:
    """Return the factors and residuals of low-rank sums, and the sampler of their error."""
    measure = partial(channel.samples.factors, direction) if channel.sampling else None
    return Factored(channel.state.residuals, channel.state.factors, measure)


def _parts(pieces: Sequence[Piece], group: Group) -> PartsOfRank:
    """Return the pieces that this rank encodes, and those of them whose sum it owns.

    A rank encodes the whole message, or in two levels its slice of the node's sum; then it encodes
    again the sums that it owns. The result is cached for a tuple of pieces.
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
