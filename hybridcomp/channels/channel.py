"""Channel: one dimension of one engine, the only object that a patch calls.

A patch asks ``channel.codec(...)`` first. ``None`` means native: the patch reports the message with
``channel.native(...)`` and calls upstream's original, so that ``none`` is bit-identical.
Otherwise it passes the tensors and that codec; the channel adds error feedback, calls the
collective and writes the ledger. Reductions are in this module, gathers, exchanges and
point-to-point messages in ``moves``, broadcasts and reductions to one rank in ``rooted``.

In two levels the sum of a node is encoded, cut into one stretch for each of its ranks. So a
residual covers only this rank's stretch, which ``Group`` gives. After a change of ranks those of a
node hold residuals in common; the pieces of the whole message show which of them the others take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp import collectives
from hybridcomp.channels import low_rank
from hybridcomp.channels.engine_state import ATTRIBUTE, EngineState
from hybridcomp.channels.error_feedback import Piece, Withheld, borders, cut
from hybridcomp.channels.low_rank import Factored
from hybridcomp.channels.replicated import Exact, stretches_of
from hybridcomp.channels.rooted import Rooted
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import (
    Group,
    Handle,
    OwnedRange,
    Probe,
    ReduceScatterHandle,
    Reduction,
    Transfer,
    all_reduce_codecs,
    chunk_ranges,
    owner_hops,
)
from hybridcomp.policy import Dimension, Direction

#: residuals of this rank's values (first hop) and of the sum that it owns (second hop)
Residuals = tuple[Tensor | None, Tensor | None]


def channel_of(obj: Any, dimension: Dimension) -> Channel | None:
    """Return the channel of an attached engine or of an object tagged with it, None without one."""
    channels = getattr(obj, ATTRIBUTE, None)
    if channels is None:
        return None
    channel: Channel = channels.by_dimension[dimension]
    return channel


class Channel(Rooted):
    """One dimension: policy, ledger and residuals around the collectives."""

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        super().__init__(dimension, state)
        #: whether parameters travel as differences from the last gather
        self.delta = dimension == "zero" and state.config.zero.delta

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._state.step

    @property
    def generation(self) -> int:
        """The generation of the references of deltas; see ``Channels.resync``."""
        return self._state.generation

    @property
    def exact_step(self) -> bool:
        """Return whether this step gathers exact parameters, as ``resync_every`` asks."""
        every = self._state.config.zero.resync_every
        return every > 0 and self.step % every == 0

    def all_reduce(
        self,
        tensor: Tensor,
        codec: Codec,
        group: ProcessGroup | None,
        *,
        raw_nbytes: int,
        pieces: Sequence[Piece] | None = None,
        direction: Direction = "forward",
        async_op: bool = False,
        taken: Mapping[str, Tensor] | None = None,
    ) -> Handle:
        """Sum ``tensor`` (1-D, contiguous) over ``group`` in place; see ``collectives``.

        ``taken``: by name of ``pieces`` a bool () on the device of ``tensor``, whether the caller
        takes that sum or throws it away: the residual then waits for a message that counts. Sums of
        other names are taken.
        """
        known, meter = self.group(group), self.meter(tensor.device)
        exact = self._take([tensor], None if pieces is None else [pieces], codec, known)
        kept = Withheld(taken) if taken and self.error_feedback else None
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), self._low_rank(direction)
            if kept is not None and pieces is not None:
                held = self._state.residuals.get("sender", pieces, tensor, last=True)
                kept.take(held, pieces)
            handle = low_rank.all_reduce(tensor, via, factors, pieces, async_op)
        else:
            how = Reduction(codec, known, meter, flush=self._flushes(codec))
            if pieces is not None or self.sampling:
                self._watch(how, tensor, pieces, direction)
            if kept is not None and pieces is not None:
                own = _encoded(pieces, known)
                kept.take(how.residual, own)
                kept.take(how.owner_residual, _chunk(own, known))
            handle = collectives.all_reduce(tensor, how, async_op)
        if kept is not None:
            handle.then(kept.give_back)
        if exact is not None:
            exact.count(meter)
            handle.then(lambda: exact.put(tensor))
        return self._recorded(handle, meter, raw_nbytes, direction, known.ring)

    def _watch(
        self,
        how: Reduction,
        tensor: Tensor,
        pieces: Sequence[Piece] | None,
        direction: Direction,
    ) -> None:
        """Set the cuts, residuals and error probe of the all-reduce ``how`` of ``tensor``."""
        how.cuts = self._cuts(how.codec, pieces, how.group)
        codecs = all_reduce_codecs(
            how.codec, tensor.dtype, how.group.encoders, tensor.device, how.cuts
        )
        how.residual, how.owner_residual = self._residuals(pieces, how.group, tensor, len(codecs))
        if self.sampling:
            how.probe = self._probe(codecs[0], direction)

    def reduce_scatter(
        self,
        shards: Sequence[Tensor],
        codec: Codec,
        group: ProcessGroup | None,
        *,
        raw_nbytes: int,
        pieces: Sequence[Sequence[Piece]] | None = None,
        direction: Direction = "forward",
        async_op: bool = False,
    ) -> ReduceScatterHandle:
        """Sum this rank's shard over ``group``; ``shards[r]`` is this rank's part of rank r's sum.

        ``wait()`` of the handle gives the sum, a new fp32 tensor.
        """
        known, meter = self.group(group), self.meter(shards[0].device)
        exact = self._take(shards, pieces, codec, known)
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), self._low_rank(direction)
            handle = low_rank.reduce_scatter(shards, via, factors, pieces, async_op)
        else:
            how = Reduction(codec, known, meter, flush=self._flushes(codec))
            handle = self._scatter(shards, how, pieces, direction, async_op)
        if exact is not None:
            exact.count(meter)
            handle.then(lambda: exact.put(handle.wait(), known.rank))
        return self._recorded(handle, meter, raw_nbytes, direction, known.ring)

    def _scatter(
        self,
        shards: Sequence[Tensor],
        how: Reduction,
        pieces: Sequence[Sequence[Piece]] | None,
        direction: Direction,
        async_op: bool,
    ) -> ReduceScatterHandle:
        """Reduce-scatter ``shards``, with residuals for those that this rank encodes."""
        group, encoded = how.group, how.group.receivers
        cuts = residuals = None
        if pieces is not None and self._separates(how.codec):
            cuts = [borders(pieces[rank]) for rank in encoded]
        if pieces is not None and self.error_feedback:
            flat = [piece for rank in encoded for piece in pieces[rank]]
            whole = [piece for row in pieces for piece in row] if group.levels else ()
            held = self._state.residuals.get("sender", flat, shards[0], last=True, message=whole)
            residuals = torch.split(held, [shards[rank].numel() for rank in encoded])
        if self.sampling:
            (first,) = how.codec.hops(1, group.encoders, exact=1)
            how.probe = self._probe(first, direction)
        return collectives.reduce_scatter(shards, how, residuals, cuts, async_op)

    def reduce_to_owners(
        self,
        tensor: Tensor,
        ranges: Sequence[OwnedRange],
        codec: Codec,
        group: ProcessGroup | None,
        *,
        raw_nbytes: int,
        pieces: Sequence[Piece] | None = None,
    ) -> list[Tensor]:
        """Sum ``tensor`` over ``group``; return the fp32 sums of the ranges this rank owns."""
        known, meter = self.group(group), self.meter(tensor.device)
        exact = self._take([tensor], None if pieces is None else [pieces], codec, known)
        if codec.low_rank is not None:
            via, factors = Transfer(codec, known, meter), self._low_rank("forward")
            sums = low_rank.reduce_to_owners(tensor, ranges, via, factors, pieces)
        else:
            hops = owner_hops(ranges, tensor.numel(), known)
            cuts = self._cuts(codec, pieces, known)
            left = self._residuals(pieces, known, tensor, hops)
            probe = None
            if self.sampling:
                probe = self._probe(codec.hops(hops, known.encoders, exact=1)[0], "forward")
            flush = self._flushes(codec)
            how = Reduction(codec, known, meter, cuts, *left, probe, flush=flush)
            sums = collectives.reduce_to_owners(tensor, ranges, how)
        if exact is not None:
            exact.count(meter)
            owned = [part for part in ranges if known.rank in part.ranks]
            for part, total in zip(owned, sums, strict=True):
                exact.put(total, start=part.start)
        self._record(meter, raw_nbytes, "forward", known.ring)
        return sums

    def _take(
        self,
        tensors: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]] | None,
        codec: Codec,
        group: Group,
    ) -> Exact | None:
        """Take parameters common to tensor-parallel ranks out of a message; sum them exactly."""
        names = self._state.common
        if pieces is None or codec.lossless or not names:
            return None
        stretches = stretches_of(pieces, names)
        return Exact(tensors, stretches, group) if stretches else None

    def _flushes(self, codec: Codec) -> bool:
        """Return whether a message with ``codec`` sends the residuals for the last time.

        Error feedback is on with lossy codecs only, so a lossless one marks such a step.
        """
        return self.error_feedback and codec.lossless

    def _separates(self, codec: Codec) -> bool:
        """Return whether parameters of one message must be encoded independently of each other."""
        return codec.bounded or (bool(self._state.common) and not codec.lossless)

    def _cuts(self, codec: Codec, pieces: Sequence[Piece] | None, group: Group) -> Sequence[int]:
        """Return the borders of parameters, in this rank's part, that ``codec`` must not cross."""
        if pieces is None or not self._separates(codec):
            return ()
        return borders(_encoded(pieces, group))

    def _residuals(
        self, pieces: Sequence[Piece] | None, group: Group, like: Tensor, hops: int
    ) -> Residuals:
        """Return the sender's residual and, for two hops, the owner's; None: no error feedback."""
        if pieces is None or not self.error_feedback:
            return None, None
        held, own = self._state.residuals, _encoded(pieces, group)
        whole = pieces if group.levels else ()
        if hops == 1:
            return held.get("sender", own, like, last=True, message=whole), None
        return held.pair(own, _chunk(own, group), like, message=whole)

    def _probe(self, first: Codec, direction: Direction) -> Probe:
        """Return a function that samples the error of the first encoding, with codec ``first``."""

        def probe(values: Tensor, cuts: Sequence[int], residual: Tensor | None) -> None:
            self.sample(values, first, direction, cuts, residual=residual)

        return probe

    def _low_rank(self, direction: Direction) -> Factored:
        measure = partial(self._samples.factors, direction) if self.sampling else None
        return Factored(self._state.residuals, self._state.factors, measure)


def _encoded(pieces: Sequence[Piece], group: Group) -> Sequence[Piece]:
    """Return the pieces of a message that this rank encodes: all, or its stretch of the node's."""
    numel = sum(piece.numel for piece in pieces)
    return cut(pieces, *chunk_ranges(numel, group.width)[group.local])


def _chunk(own: Sequence[Piece], group: Group) -> Sequence[Piece]:
    """Return the part of ``own`` whose sum this rank owns and encodes again."""
    numel = sum(piece.numel for piece in own)
    return cut(own, *chunk_ranges(numel, group.encoders)[group.index])
