"""Keep weights that no optimizer changes encoded on every rank, so that they are gathered once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.comparisons import words_of_all
from hybridcomp.channels.messages.delta_references import digest
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.config.parameter import FrozenConfig

#: said where the block keeps frozen weights and the model has none to keep
NONE_KEPT = "zero: no frozen parameter is gathered, so none is kept"
#: number of flags in the word that ranks exchange; the sign bit is unused
FLAGS = 62
#: shares of up to so many values are hashed together: a call costs as much as half a megabyte more
SMALL = 1 << 18


class KeptWeights:
    """Encoded values of one shape, on the device that computes with them or on the host."""

    def __init__(self, values: Tensor, settings: FrozenConfig, is_vector: bool) -> None:
        """Encode ``values``, 1-D and contiguous: exactly, or in a few bits if they are a matrix."""
        bits = None if is_vector else settings.bits
        self._codec: Codec = ExpCode() if bits is None else BlockInt(bits=bits)
        self._like, self._numel = values[:0].clone(), values.numel()
        nbytes = self._codec.wire_nbytes(self._numel, values.dtype)
        room = values.new_empty(nbytes, dtype=torch.uint8)
        used = self._codec.encode(values, room)
        self._payload = room[:used].to("cpu" if settings.on == "host" else room.device, copy=True)
        if settings.on == "host" and values.is_cuda:
            self._payload = self._payload.pin_memory()

    @property
    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        return self._payload.nbytes

    def decoded(self) -> Tensor:
        """Return the values, 1-D."""
        out = self._like.new_empty(self._numel)
        self._codec.decode(self._payload.to(out.device, non_blocking=True), out)
        return out


def hashes_of(shares: Sequence[Tensor]) -> list[int]:
    """Return a hash of the bits of each 1-D share, of values of 2 or 4 bytes."""
    found = [digest(share.contiguous()) for share in shares]
    return torch.stack(found).tolist() if found else []  # the host waits once


def hashes_together(shares: Iterable[Tensor]) -> list[int]:
    """Return hashes of 1-D shares like ``hashes_of``, but one for all small shares of a dtype."""
    large: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for share in shares:
        (small.setdefault(share.dtype, []) if share.numel() <= SMALL else large).append(share)
    return hashes_of([*large, *map(torch.cat, small.values())])


def changed_anywhere(
    channel: Channel,
    flags: Callable[[], Sequence[bool]],
    count: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[bool]:
    """Return which of ``count`` flags are set on any rank of ``group``; a collective.

    ``flags()`` returns those of this rank. If it fails on one rank, this raises on all of them.
    """

    def words() -> list[int]:
        found = [0] * -(-count // FLAGS)
        for place, flag in enumerate(flags()):
            found[place // FLAGS] |= int(flag) << place % FLAGS
        return found

    rows = words_of_all(channel, words, -(-count // FLAGS), device, group)
    return [any(row[place // FLAGS] >> place % FLAGS & 1 for row in rows) for place in range(count)]
