"""Gather parameters as differences from the last gather (SDP4Bit, arXiv 2410.15526).

A parameter hardly moves in one step, so the error of encoding its *change* in a few bits is a small
part of the parameter: with 4 bits 1e-1 of the change, 1e-3 of the weight and less. The reference
that a delta is added to is the gathered buffer, which every rank holds already. Only this rank's
share of it is copied, because the optimizer overwrites it: 1/ranks of the buffer.

Lossy codecs carry ``new - reference`` in fp32; every rank, the owner included, then holds
``round(reference + decoded)``, so the error is part of the next difference without further work.
The new values have the buffer's dtype: for bf16 they track the fp32 master weights as well as
differences from the masters do (measured: relative error 1.63e-3 and 1.66e-3 at 4 bits, of which
1.59e-3 are the rounding to bf16), and elements that did not move are exact zeros. Lossless codecs
carry the difference of the bit patterns as integers, which adds up exactly. ``stepcode`` takes both
versions instead, and is decoded where the earlier one is, without a buffer for the difference.

With deltas, references that differ between ranks would differ for ever. So before each gather the
ranks compare a digest of the reference, 16 bytes a rank; where one differs (somebody wrote into
the parameters), is missing, or has a value that is not finite, all ranks gather exact values. Such
a gather overwrites what was written into the parameters, as upstream's does.

Shapes: W ranks in the group, ``rows`` (W, n): the buffer, one share a row.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.moves import AllGather
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.collectives.wire import POOL
from hybridcomp.log import say

#: attribute of a buffer that is gathered by deltas: its Reference
ATTRIBUTE = "_hybridcomp_reference"
#: 64-bit words that are weighted differently in a digest; prime, so that no row length divides it
WEIGHTS = 4093
#: chunks of a share start at multiples of this: no codec block or segment is cut
CHUNK_ALIGN = 4096

#: values that are worked on at once
PIECE, CPU_PIECE = 1 << 22, 1 << 16

_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass
class Reference:
    """This rank's share of a buffer as last gathered; the buffer holds the other ranks' shares."""

    own: Tensor  # copy of this rank's share, (n,), the buffer's dtype
    generation: int  # of the channels; an older one is not used any more


def reference_of(buffer: Tensor) -> Reference | None:
    """Return the reference of a gathered buffer, None before the first exact gather."""
    found: Reference | None = getattr(buffer, ATTRIBUTE, None)
    return found


def keep(channel: Channel, buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Keep this rank's share as the reference of an exact gather; call before or after it."""
    own = _rows(buffer, group)[dist.get_rank(group)]
    reference = reference_of(buffer)
    if reference is None:
        setattr(buffer, ATTRIBUTE, Reference(own.clone(), channel.generation))
    else:
        reference.own.copy_(own)
        reference.generation = channel.generation


def leave(channel: Channel, buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Prepare upstream's gather: keep the reference where deltas may follow, else drop it."""
    if channel.delta and channel.pauses:
        keep(channel, buffer, group)
    else:
        forget(buffer)


def forget(buffer: Tensor) -> None:
    """Drop the reference of a buffer: its next gather is exact."""
    if reference_of(buffer) is not None:
        delattr(buffer, ATTRIBUTE)


@torch.no_grad()
def agreed(channel: Channel, buffer: Tensor, codec: Codec, group: dist.ProcessGroup | None) -> bool:
    """Return whether this gather sends deltas, the same on all ranks; a collective.

    False: gather exactly and ``keep``. Prints a message where references differ between ranks.
    """
    if channel.exact_step:
        return False
    return alike(channel, _state(channel, buffer, codec, group), buffer.device, group)


def alike(
    channel: Channel,
    state: tuple[bool, int],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> bool:
    """Return whether all ranks are ready and hold the same, the same on all ranks; a collective.

    ``state``: whether this rank is ready, and the digest of what it holds.
    """
    mine = torch.tensor(state, dtype=torch.int64, device=device)
    states = channel.gather_words(mine, group)
    if not all(ready for ready, _ in states):
        return False
    usual, count = Counter(digest for _, digest in states).most_common(1)[0]
    if count == len(states):
        return True
    if dist.get_rank(group) == 0:
        ranks = [rank for rank, (_, digest) in enumerate(states) if digest != usual or count == 1]
        say(
            f"{channel.dimension}, step {channel.step}: parameters of ranks {ranks} "
            f"of {len(states)} are not what the last gather left there (somebody wrote into "
            "them), so deltas would go wrong; this gather is exact",
            anywhere=True,  # rank 0 of the job may be in another group
        )
    return False


@dataclass(eq=False, kw_only=True)
class GatherParameters(AllGather):
    """Gather the shares of a buffer of parameters, as differences where the block asks for them.

    Attributes:
        buffer: the object that upstream gathers, which carries the reference; ``out`` is its flat
            view, and ``shard`` this rank's share.
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
        """Return whether the ranks have no common reference, so that this gather makes one."""
        if not channel.delta or agreed(channel, self.buffer, codec, self.group):
            return False
        keep(channel, self.buffer, self.group)
        self.is_kept = True
        return True

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Gather encoded; several chunks are complete when this returns."""
        numel = self.shard.numel()
        chunk = numel
        if self.limit:
            # differences are fp32: chunks of half the values
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
        rows = _rows(self.out, self.group)
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
    """Gather by deltas; ``buffer`` holds the new values in this rank's share.

    After ``wait()`` it holds the same on all ranks. Only after ``agreed`` has returned True.

    Args:
        buffer: 1-D contiguous fp32/bf16/fp16, W equal shares.
        columns: the elements of each share that are gathered, all by default.
    """
    rank, reference = dist.get_rank(group), reference_of(buffer)
    assert reference is not None, "deltas without a reference"
    start, stop = columns or (0, reference.own.numel())
    rows = _rows(buffer, group)[:, start:stop]
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
    """Gather by a codec that takes references: ``rows`` (W, n) are decoded where they are.

    This rank's row has the new values, the others what the last gather left; ``held``: that of this
    rank, which is renewed.
    """
    places, rank = rows.contiguous(), dist.get_rank(group)  # a copy of columns of the buffer
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
    """Return a tensor of ``numel`` undefined values and its pool buffer, None without one."""
    if like.dtype != torch.float32:
        return like.new_empty(numel), None
    buffer, values = POOL.take_fp32(numel, like.device)
    return values, buffer


def _difference(new: Tensor, old: Tensor, codec: Codec) -> tuple[Tensor, Tensor | None]:
    """Return ``new - old`` (of bit patterns if lossless) and its pool buffer, None without one."""
    if codec.lossless:
        integers = _INTEGERS[new.dtype.itemsize]
        return (new.view(integers) - old.view(integers)).view(new.dtype), None
    buffer, out = POOL.take_fp32(new.numel(), new.device)
    for part, one, other in _pieces(out, new, old):
        torch.sub(one.float(), other.float(), out=part)
    return out, buffer


def _add(rows: Tensor, decoded: Tensor, codec: Codec) -> None:
    if codec.lossless:
        integers = _INTEGERS[rows.dtype.itemsize]
        rows.view(integers).add_(decoded.view(integers))
        return
    for row, change in zip(rows, decoded, strict=True):
        for part, more in _pieces(row, change):
            part.copy_(more.add_(part.float()))  # the sum in fp32, rounded once


def _rows(buffer: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return buffer.detach().view(dist.get_world_size(group), -1)


def _state(
    channel: Channel, buffer: Tensor, codec: Codec, group: dist.ProcessGroup | None
) -> tuple[bool, int]:
    """Return ``(ready, digest)`` of the reference of this rank."""
    reference, rank = reference_of(buffer), dist.get_rank(group)
    rows = _rows(buffer, group)
    if (
        reference is None
        or reference.generation != channel.generation
        or reference.own.numel() != rows.shape[1]
    ):
        return False, 0
    shares = [reference.own if row == rank else share for row, share in enumerate(rows)]
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for row, share in enumerate(shares):
        total += (2 * row + 1) * digest(share)  # odd: no difference is lost modulo 2^64
    # a reference that is not finite stays so whatever is added
    ready = codec.lossless or all(
        (new.float() - old.float()).sum().isfinite()
        for new, old in _pieces(rows[rank], reference.own)
    )
    return ready, int(total)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut 1-D tensors of one length into pieces that stay in a CPU's cache."""
    numel = CPU_PIECE if tensors[0].device.type == "cpu" else PIECE
    yield from zip(*(torch.split(tensor, numel) for tensor in tensors), strict=True)


def digest(values: Tensor) -> Tensor:
    """Return an int64 sum of the bits of ``values`` (1-D, contiguous), weighted by position.

    A change of a single element always changes it. One pass, at the speed of memory.
    """
    per_word = 8 // values.dtype.itemsize
    whole = values.numel() // per_word * per_word
    if values.storage_offset() % per_word or values.data_ptr() % 8:
        values = values.clone()
    words = values[:whole].view(torch.int64)
    cut = words.numel() // WEIGHTS * WEIGHTS
    table, rest = words[:cut], words[cut:]
    weights = _weights(values.device)
    total = (table.view(-1, WEIGHTS).sum(0) * weights[:WEIGHTS]).sum()
    total += (rest * weights[: rest.numel()]).sum()
    tail = values[whole:].view(_INTEGERS[values.dtype.itemsize])
    return total + (tail * weights[WEIGHTS : WEIGHTS + tail.numel()]).sum()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return WEIGHTS + 3 pseudo-random odd numbers: odd ones lose no difference modulo 2^64."""
    numbers = torch.arange(1, WEIGHTS + 4, device=device) * 0x1E3779B97F4A7C15
    numbers = (numbers ^ (numbers >> 29)) * 0x3F58476D1CE4E5B9
    return (numbers ^ (numbers >> 32)) | 1
