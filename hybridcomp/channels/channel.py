"""Channel: one dimension of one engine. The only thing that a patch calls.

A patch asks ``channel.codec(...)`` first. ``None`` means native: the patch reports the message with
``channel.native(...)`` and calls upstream's original, so that ``none`` is bit-identical.
Otherwise it hands the tensors over with that codec; the channel adds error feedback, calls the
collective and writes the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels import reductions
from hybridcomp.channels.codec_choice import Choice
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.channels.error_samples import Samples
from hybridcomp.channels.replicated import Exact, stretches_of
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle, Levels, OwnedRange, ReduceScatterHandle
from hybridcomp.collectives.hierarchical import two_levels
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.policy import Dimension, Direction
from hybridcomp.topology import Reach

if TYPE_CHECKING:
    from hybridcomp.channels.engine_channels import Channels

H = TypeVar("H", Handle, ReduceScatterHandle)

#: dimensions whose groups are seen as nodes times local ranks
TWO_LEVELS: tuple[Dimension, ...] = ("dp", "zero")
#: where nothing is known of nodes
NOWHERE = Reach(frozenset(), 0.0)


class Channel(Choice):
    """One dimension: policy, ledger and residuals around the collectives."""

    def __init__(self, dimension: Dimension, channels: Channels) -> None:
        super().__init__(dimension, channels)
        self.delta = dimension == "zero" and channels.config.zero.delta
        self.samples = Samples(dimension, channels)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._channels.step

    @property
    def generation(self) -> int:
        """Of the references of deltas; see ``Channels.resync``."""
        return self._channels.generation

    @property
    def exact_step(self) -> bool:
        """Whether parameter deltas start anew in this step, by ``resync_every``."""
        every = self._channels.config.zero.resync_every
        return every > 0 and self.step % every == 0

    def native(self, raw_nbytes: int, direction: Direction = "forward") -> None:
        """Write down a message that upstream sends itself; a group of one sends nothing."""
        if raw_nbytes:
            self._channels.ledger.record_native((self.dimension, direction), raw_nbytes)

    def gather_words(self, words: Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
        """The int64 ``words`` of all ranks, sent beside a message of upstream; waits for them."""
        meter = self.meter(words.device, self._reach(group).remote)
        rows = collectives.gather_words(words, group, meter)
        self._channels.ledger.record_extra((self.dimension, "forward"), meter)
        return rows

    def all_reduce(
        self,
        tensor: Tensor,
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        raw_nbytes: int,
        pieces: Sequence[Piece] | None = None,
        direction: Direction = "forward",
        async_op: bool = False,
    ) -> Handle:
        """Sum ``tensor`` (1-D, contiguous) over ``group`` in place; see ``collectives``."""
        spot = self._spot(codec, group, direction, tensor.device)
        exact = self._take([tensor], None if pieces is None else [pieces], codec, group)
        handle, meter = reductions.all_reduce(tensor, codec, spot, pieces, async_op)
        if exact is not None:
            exact.count(meter, self._reach(group).ring)
            handle.then(lambda: exact.put(tensor))
        return self._recorded(handle, meter, raw_nbytes, direction, self._reach(group).ring)

    def reduce_scatter(
        self,
        shards: Sequence[Tensor],
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        raw_nbytes: int,
        pieces: Sequence[Sequence[Piece]] | None = None,
        direction: Direction = "forward",
        async_op: bool = False,
    ) -> ReduceScatterHandle:
        """Sum over ``group`` what goes to this rank; ``shards[r]`` goes to rank r.

        ``wait()`` of the handle gives the sum, a new fp32 tensor.
        """
        spot = self._spot(codec, group, direction, shards[0].device)
        exact = self._take(shards, pieces, codec, group)
        handle, meter = reductions.reduce_scatter(shards, codec, spot, pieces, async_op)
        if exact is not None:
            exact.count(meter, self._reach(group).ring)
            handle.then(lambda: exact.put(handle.wait(), dist.get_rank(group)))
        return self._recorded(handle, meter, raw_nbytes, direction, self._reach(group).ring)

    def reduce_to_owners(
        self,
        tensor: Tensor,
        ranges: Sequence[OwnedRange],
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        raw_nbytes: int,
        pieces: Sequence[Piece] | None = None,
    ) -> list[Tensor]:
        """The fp32 sums over ``group`` of the ranges of ``tensor`` that this rank owns."""
        spot = self._spot(codec, group, "forward", tensor.device)
        exact = self._take([tensor], None if pieces is None else [pieces], codec, group)
        found, meter = reductions.reduce_to_owners(tensor, ranges, codec, spot, pieces)
        if exact is not None:
            exact.count(meter, self._reach(group).ring)
            rank = dist.get_rank(group)
            owned = [part for part in ranges if rank in part.ranks]
            for part, total in zip(owned, found, strict=True):
                exact.put(total, start=part.start)
        self._record(meter, raw_nbytes, "forward", self._reach(group).ring)
        return found

    def all_gather(
        self,
        shard: Tensor,
        out: Tensor,
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        raw_nbytes: int,
        direction: Direction = "forward",
        cuts: Sequence[int] = (),
        async_op: bool = False,
        relative_to: Tensor | None = None,
    ) -> Handle:
        """Gather the shards of all ranks into ``out``; every rank decodes the same bytes.

        ``cuts``: see ``collectives.all_gather``. ``relative_to``: what the sampled error is stated
        for, where ``shard`` is a part of it.
        """
        (only,) = codec.hops(1, 1, result=shard.dtype)
        self.samples.take(shard, only, direction, cuts, relative_to)
        levels, reach = self._levels(group), self._reach(group)
        if levels is not None:
            meter = self.meter(shard.device, frozenset(range(levels.nodes)))
            handle = two_levels.all_gather(
                shard, out, codec, levels, meter=meter, cuts=cuts, async_op=async_op
            )
        else:
            meter = self.meter(shard.device, reach.remote)
            handle = collectives.all_gather(
                shard, out, codec, group, meter=meter, cuts=cuts, async_op=async_op
            )
        return self._recorded(handle, meter, raw_nbytes, direction, reach.ring)

    def all_to_all(
        self,
        out: Tensor,
        values: Tensor,
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        raw_nbytes: int,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        direction: Direction = "forward",
        async_op: bool = False,
    ) -> Handle:
        """Exchange parts of ``values`` between all ranks; splits in elements."""
        self.samples.take(values, codec.hops(1, 1, result=values.dtype)[0], direction)
        remote = self._reach(group).remote
        meter = self.meter(values.device, remote)
        handle = collectives.all_to_all(
            out,
            values,
            codec,
            group,
            meter=meter,
            out_splits=out_splits,
            in_splits=in_splits,
            async_op=async_op,
        )
        share = len(remote) / max(1, dist.get_world_size(group) - 1)
        return self._recorded(handle, meter, raw_nbytes, direction, share)

    def send(
        self,
        tensor: Tensor,
        dst: int,
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        raw_nbytes: int,
        direction: Direction = "forward",
    ) -> None:
        """Send ``tensor`` (1-D, contiguous) to the global rank ``dst``; blocking."""
        self.samples.take(tensor, codec.hops(1, 1, result=tensor.dtype)[0], direction)
        meter = self.meter(tensor.device)
        collectives.send(tensor, dst, codec, group, meter=meter)
        nodes = self._channels.nodes
        crosses = nodes is not None and nodes.of_rank[dst] != nodes.of_rank[dist.get_rank()]
        meter.inter_nbytes = crosses * meter.wire_nbytes
        self._record(meter, raw_nbytes, direction, float(crosses))

    def recv(
        self,
        tensor: Tensor,
        src: int,
        codec: Codec,
        group: dist.ProcessGroup | None,
        *,
        direction: Direction = "forward",
    ) -> None:
        """Receive into ``tensor`` (1-D, contiguous) from the global rank ``src``; blocking.

        The sender counts the bytes; the receiver only adds its time.
        """
        meter = self.meter(tensor.device)
        collectives.recv(tensor, src, codec, group, meter=meter)
        self._channels.ledger.record_time((self.dimension, direction), meter)

    def posts_once(self, codec: Codec, group: dist.ProcessGroup | None) -> bool:
        """Whether the handle of an ``all_gather`` sends nothing in ``wait()``."""
        return codec.fixed_size and self._levels(group) is None

    def _take(
        self,
        tensors: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]] | None,
        codec: Codec,
        group: dist.ProcessGroup | None,
    ) -> Exact | None:
        """Take what has to be summed exactly out of a message; None where it is nothing."""
        names = self._channels.common
        if pieces is None or codec.lossless or not names:
            return None
        stretches = stretches_of(pieces, names)
        return Exact(tensors, stretches, group) if stretches else None

    def meter(self, device: torch.device, remote: frozenset[int] = frozenset()) -> Meter:
        """Of a message on ``device``; ``remote``: ranks of its group on other nodes."""
        return Meter(remote=remote, clock=self._channels.clock(device), where=self._where)

    @property
    def _where(self) -> str:
        """Which messages these are, for an error about one."""
        return f"{self.dimension} at step {self.step}"

    def _spot(
        self,
        codec: Codec,
        group: dist.ProcessGroup | None,
        direction: Direction,
        device: torch.device,
    ) -> reductions.Spot:
        return reductions.Spot(
            group,
            self._levels(group),
            self._reach(group).remote,
            self._channels.residuals if self.error_feedback else None,
            lambda values, first, cuts, residual: self.samples.take(
                values, first, direction, cuts, residual=residual
            ),
            self._channels.factors,
            partial(self.samples.factors, direction) if self._channels.sampling else None,
            apart=bool(self._channels.common),
            clock=self._channels.clock(device),
            where=self._where,
        )

    def _levels(self, group: dist.ProcessGroup | None) -> Levels | None:
        nodes = self._channels.nodes
        return nodes.levels(group) if nodes is not None and self.dimension in TWO_LEVELS else None

    def _reach(self, group: dist.ProcessGroup | None) -> Reach:
        nodes = self._channels.nodes
        return nodes.reach(group) if nodes is not None else NOWHERE

    def _record(self, meter: Meter, raw_nbytes: int, direction: Direction, inter: float) -> None:
        self._channels.ledger.record((self.dimension, direction), raw_nbytes, meter, inter)

    def _recorded(
        self, handle: H, meter: Meter, raw_nbytes: int, direction: Direction, inter: float
    ) -> H:
        handle.then(lambda: self._record(meter, raw_nbytes, direction, inter))
        return handle
