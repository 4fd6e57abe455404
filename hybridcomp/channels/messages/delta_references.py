"""Keep the references to which parameter deltas are added, and compare them between ranks.

A delta is added to the gathered buffer of the last step, which every rank holds already. Only this
rank's own share, which the optimizer overwrites, is copied, into an attribute of the buffer. The
copy is freed with the buffer, saved and restored by ``patches/ds/checkpoint/exact_weights``, and
dropped after a gather without deltas.

References that differ once would differ forever. So the ranks compare a 16-byte digest of them
before each gather. If one differs (user code wrote into the parameters), is missing, or has a
non-finite value, all ranks gather exact values, which overwrites such writes just as upstream's
gather does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.comparisons import words_of_all
from hybridcomp.codecs.base import Codec
from hybridcomp.log import say

#: attribute of a buffer that is gathered by deltas: its Reference
ATTRIBUTE = "_hybridcomp_reference"
#: number of weights for the 64-bit words of a digest; prime, so that no row length divides it
WEIGHTS = 4093
#: values that are processed at once
PIECE, CPU_PIECE = 1 << 22, 1 << 16
INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass
class Reference:
    """This rank's share of a buffer as last gathered; the buffer holds the other ranks' shares."""

    own: Tensor  # copy of this rank's share, (n,), the buffer's dtype
    generation: int  # generation of the channels; a reference of an older generation is not used


def reference_of(buffer: Tensor) -> Reference | None:
    """Return the reference of a gathered buffer, None before the first exact gather."""
    found: Reference | None = getattr(buffer, ATTRIBUTE, None)
    return found


def keep(channel: Channel, buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Keep this rank's share as the reference for deltas; call before or after an exact gather."""
    own = rows_of(buffer, group)[dist.get_rank(group)]
    reference = reference_of(buffer)
    if reference is None:
        setattr(buffer, ATTRIBUTE, Reference(own.clone(), channel.generation))
    else:
        reference.own.copy_(own)
        reference.generation = channel.generation


def leave(channel: Channel, buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Prepare upstream's gather: keep the reference if deltas may follow, else drop it."""
    if channel.delta and channel.state.verdicts.comparing(channel.step):
        keep(channel, buffer, group)
    else:
        forget(buffer)


def is_exact(channel: Channel) -> bool:
    """Return whether this step gathers exact parameters, as ``resync_every`` asks."""
    every = channel.state.config.zero.resync_every
    return every > 0 and channel.step % every == 0


def forget(buffer: Tensor) -> None:
    """Drop the reference of a buffer: its next gather is exact."""
    if reference_of(buffer) is not None:
        delattr(buffer, ATTRIBUTE)


@torch.no_grad()
def agreed(channel: Channel, buffer: Tensor, codec: Codec, group: dist.ProcessGroup | None) -> bool:
    """Return whether this gather sends deltas, the same on all ranks; a collective.

    If False, the caller gathers exactly and calls ``keep``. Prints a message if references differ.
    """
    if is_exact(channel):
        return False
    return alike(channel, lambda: _state(channel, buffer, codec, group), buffer.device, group)


def alike(
    channel: Channel,
    state: Callable[[], tuple[bool, int]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> bool:
    """Return whether all ranks are ready and hold equal references; the same on all, a collective.

    ``state``: returns whether this rank is ready, and the digest of its reference. If it fails on
    one rank, this raises on all of them.
    """
    states = words_of_all(channel, state, 2, device, group)
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


def rows_of(buffer: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return buffer.detach().view(dist.get_world_size(group), -1)


def _state(
    channel: Channel, buffer: Tensor, codec: Codec, group: dist.ProcessGroup | None
) -> tuple[bool, int]:
    """Return whether this rank's reference is ready, and its digest."""
    reference, rank = reference_of(buffer), dist.get_rank(group)
    rows = rows_of(buffer, group)
    if (
        reference is None
        or reference.generation != channel.generation
        or reference.own.numel() != rows.shape[1]
    ):
        return False, 0
    shares = [reference.own if row == rank else share for row, share in enumerate(rows)]
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for row, share in enumerate(shares):
        total += (2 * row + 1) * digest(share)  # odd weights keep every difference modulo 2^64
    # adding deltas to a non-finite reference never makes it finite again
    ready = codec.lossless or all(
        (new.float() - old.float()).sum().isfinite()
        for new, old in cache_pieces(rows[rank], reference.own)
    )
    return ready, int(total)


def cache_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut 1-D tensors of one length into pieces that stay in a CPU's cache."""
    numel = CPU_PIECE if tensors[0].device.type == "cpu" else PIECE
    yield from zip(*(torch.split(tensor, numel) for tensor in tensors), strict=True)


def digest(values: Tensor) -> Tensor:
    """Return an int64 sum of the bits of ``values`` (1-D, contiguous), weighted by position.

    Changing any single element changes the sum. It takes one pass at memory speed.
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
    tail = values[whole:].view(INTEGERS[values.dtype.itemsize])
    return total + (tail * weights[WEIGHTS : WEIGHTS + tail.numel()]).sum()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return WEIGHTS + 3 pseudo-random odd numbers: odd factors keep differences modulo 2^64."""
    numbers = torch.arange(1, WEIGHTS + 4, device=device) * 0x1E3779B97F4A7C15
    numbers = (numbers ^ (numbers >> 29)) * 0x3F58476D1CE4E5B9
    return (numbers ^ (numbers >> 32)) | 1
