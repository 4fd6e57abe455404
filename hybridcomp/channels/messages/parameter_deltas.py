"""Gather parameters as differences from the last gather (SDP4Bit, arXiv 2410.15526).

A parameter hardly moves in one step, so the error of encoding its *change* in a few bits is a small
part of the parameter: with 4 bits 1e-1 of the change, 1e-3 of the weight and less. The reference
that a delta is added to is the gathered buffer, which every rank holds already. Only this rank's
share of it is copied, because the optimizer overwrites it: 1/ranks of the buffer.

Lossy codecs carry ``new - reference`` in fp32; every rank, the owner included, then holds
``round(reference + decoded)``, so the next difference includes the error automatically. The new
values have the buffer's dtype: for bf16 they track the fp32 master weights as well as differences
from the masters do (measured: relative error 1.63e-3 and 1.66e-3 at 4 bits, of which 1.59e-3 are
the rounding to bf16), and elements that did not move are exact zeros. Lossless codecs carry the
difference of the bit patterns as integers, which adds up exactly. ``stepcode`` takes both versions
instead and decodes in place over the earlier one, without a buffer for the difference.

Before each gather the ranks compare their references (``delta_references``).

Shapes: W ranks in the group, ``rows`` (W, n): the buffer, one share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.delta_references import (
    INTEGERS,
    agreed,
    cache_pieces,
    keep,
    leave,
    reference_of,
    rows_of,
)
from hybridcomp.channels.messages.p2p_and_gather import AllGather
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.collectives.wire.encoding import POOL

#: chunks of a share start at multiples of this, so that no codec block or segment is cut
CHUNK_ALIGN = 4096


@dataclass(eq=False, kw_only=True)
class GatherParameters(AllGather):
    """Gather the shares of a buffer of parameters, as differences where the block asks for them.

    Attributes:
        buffer: the object that upstream gathers and that carries the reference; ``out`` is its flat
            view, ``shard`` this rank's share.
        limit: elements of all shares in one message, a bound on the memory of payloads; 0: none.
    """

    buffer: Tensor
    limit: int = 0
    is_kept: bool = False

    def leave(self, channel: Channel) -> None:
        """Prepare upstream's gather of the buffer."""
        if not self.is_kept and not channel.is_suspended:
            leave(channel, self.buffer, self.group)

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether the ranks lack a common reference, so that this gather must make one."""
        if not channel.delta or agreed(channel, self.buffer, codec, self.group):
            return False
        keep(channel, self.buffer, self.group)
        self.is_kept = True
        return True

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Gather encoded shares; if there are several chunks, they are complete on return."""
        numel = self.shard.numel()
        chunk = numel
        if self.limit:
            # differences are fp32, twice the size: use chunks of half the values
            limit = self.limit // 2 if channel.delta else self.limit
            size = dist.get_world_size(self.group)
            chunk = max(1, limit // size // CHUNK_ALIGN) * CHUNK_ALIGN
        if chunk >= numel:
            return self._columns(channel, codec, 0, numel)
        for start in range(0, numel, chunk):
            handle = self._columns(channel, codec, start, min(start + chunk, numel))
            handle.wait()
        return handle

    def _columns(self, channel: Channel, codec: Codec, start: int, stop: int) -> Handle:
        """Gather the elements ``[start, stop)`` of each share."""
        if channel.delta:
            return gather(
                channel, self.buffer, codec, self.group, columns=(start, stop),
                async_op=self.async_op,
            )  # fmt: skip
        if stop - start == self.shard.numel():
            return super().send(channel, codec)
        rows = rows_of(self.out, self.group)
        out = self.out.new_empty(len(rows) * (stop - start))
        part = AllGather(
            numel=self.numel, dtype=self.dtype, group=self.group, shard=self.shard[start:stop],
            out=out,
        )  # fmt: skip
        handle = part.send(channel, codec)
        return handle.then(lambda: _put(rows[:, start:stop], out))


def _put(rows: Tensor, gathered: Tensor) -> None:
    rows.copy_(gathered.view(rows.shape))


def gather(
    channel: Channel,
    buffer: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None,
    *,
    columns: tuple[int, int] | None = None,
    async_op: bool = False,
) -> Handle:
    """Gather by deltas; this rank's share of ``buffer`` holds its new values.

    After ``wait()`` the buffer is the same on all ranks. Call it only if ``agreed`` returned True.

    Args:
        buffer: 1-D contiguous fp32/bf16/fp16, W equal shares.
        columns: the elements of each share that are gathered, all by default.
    """
    rank, reference = dist.get_rank(group), reference_of(buffer)
    assert reference is not None, "deltas without a reference"
    start, stop = columns or (0, reference.own.numel())
    rows = rows_of(buffer, group)[:, start:stop]
    own, held = rows[rank], reference.own[start:stop]
    if codec.references:
        return gather_steps(channel, rows, held, codec, group, async_op)
    difference, taken = _difference(own, held, codec)
    out, filled = _room(rows.numel(), difference)
    message = AllGather(
        numel=buffer.numel(), dtype=buffer.dtype, group=group, shard=difference, out=out,
        relative_to=own, async_op=async_op,
    )  # fmt: skip
    handle = message.send(channel, codec)

    @torch.no_grad()
    def add() -> None:
        own.copy_(held)
        _add(rows, out.view(rows.shape), codec)
        held.copy_(own)
        POOL.give(taken, filled)

    return handle.then(add)


def gather_steps(
    channel: Channel,
    rows: Tensor,
    held: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None,
    async_op: bool = False,
) -> Handle:
    """Gather by a codec that has ``references``; ``rows`` (W, n) are decoded in place.

    This rank's row holds its new values, every other row a rank's values of the last gather.
    ``held``: this rank's values of the last gather; replaced by the new ones.
    """
    # contiguous rows: a copy, if they are columns of the buffer
    places, rank = rows.contiguous(), dist.get_rank(group)
    message = AllGather(
        numel=rows.numel(), dtype=rows.dtype, group=group, shard=places[rank],
        out=places.view(-1), async_op=async_op,
    )  # fmt: skip
    handle = message.send(channel, codec.against(held))

    @torch.no_grad()
    def renew() -> None:
        if places.data_ptr() != rows.data_ptr():
            rows.copy_(places)
        held.copy_(rows[rank])

    return handle.then(renew)


def _room(numel: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor of ``numel`` undefined values, and its pool buffer or None."""
    if like.dtype != torch.float32:
        return like.new_empty(numel), None
    buffer, values = POOL.take_fp32(numel, like.device)
    return values, buffer


def _difference(new: Tensor, old: Tensor, codec: Codec) -> tuple[Tensor, Tensor | None]:
    """Return ``new - old`` (of bit patterns if lossless), and its pool buffer or None."""
    if codec.lossless:
        integers = INTEGERS[new.dtype.itemsize]
        return (new.view(integers) - old.view(integers)).view(new.dtype), None
    buffer, out = POOL.take_fp32(new.numel(), new.device)
    for part, one, other in cache_pieces(out, new, old):
        torch.sub(one.float(), other.float(), out=part)
    return out, buffer


def _add(rows: Tensor, decoded: Tensor, codec: Codec) -> None:
    if codec.lossless:
        integers = INTEGERS[rows.dtype.itemsize]
        rows.view(integers).add_(decoded.view(integers))
        return
    for row, change in zip(rows, decoded, strict=True):
        for part, more in cache_pieces(row, change):
            part.copy_(more.add_(part.float()))  # the sum is computed in fp32 and rounded once
