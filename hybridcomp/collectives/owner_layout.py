"""Lay out the payloads for owners in the order in which the message holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.launches import PlannedStretch
from hybridcomp.collectives.wire.splits import Splits

#: bytes of a word in which payloads are copied; payload sizes are multiples of it
WORD = 8


@dataclass(frozen=True)
class SendingRank:
    """This rank in an exchange: its number, the number of ranks, codec, dtype, device and cuts."""

    me: int
    ranks: int
    codec: Codec
    dtype: torch.dtype
    device: torch.device
    cuts: tuple[int, ...]

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the payload of ``numel`` values."""
        return self.codec.wire_nbytes(numel, self.dtype)


@dataclass(frozen=True, eq=False)
class CopiedPayloads:
    """Copies of payloads that go to several ranks, in one launch for any number of copies.

    Attributes:
        nbytes: bytes of all payloads, each counted once.
        unit: words of a row: the greatest common divisor of the payloads' lengths in words.
        rows: for each row of the message, the row of the payloads that it copies; int64 on the
            device. With the shortest payloads ``rows`` takes half as many bytes as the message.
    """

    nbytes: int
    unit: int
    rows: Tensor

    def copy(self, payloads: Tensor, message: Tensor) -> None:
        """Copy ``payloads`` into ``message``, both uint8."""
        words, out = (each.view(torch.int64).view(-1, self.unit) for each in (payloads, message))
        torch.index_select(words, 0, self.rows, out=out)


#: values to send: the ranks that receive them, the first element, the number of elements
Part = tuple[tuple[int, ...], int, int]


def lay_out(
    parts: Sequence[Part], of: SendingRank
) -> tuple[Splits, list[PlannedStretch], CopiedPayloads | None]:
    """Lay payloads out by receiving rank, then in the order of ``parts``.

    Returns the bytes to each rank, a slice for each part, and the copies that build the message
    from the payloads. The copies are None if no payload goes to several ranks: the payloads are
    then the message.
    """
    sizes = [of.nbytes(numel) for _, _, numel in parts]
    message: list[list[int]] = [[] for _ in range(of.ranks)]
    for number, (ranks, _, _) in enumerate(parts):
        for rank in ranks:
            message[rank].append(number)
    gives = Splits([sum([sizes[number] for number in row]) for row in message])
    order = list(dict.fromkeys(number for row in message for number in row))
    starts = accumulate([sizes[number] for number in order], initial=0)
    place = dict(zip(order, starts, strict=False))
    stretches = [
        PlannedStretch(low, numel, place[number]) for number, (_, low, numel) in enumerate(parts)
    ]
    if all(len(ranks) == 1 for ranks, _, _ in parts):
        return gives, stretches, None
    unit = gcd(*sizes)
    rows = [
        torch.arange(place[number] // unit, (place[number] + sizes[number]) // unit, device="cpu")
        for row in message
        for number in row
    ]
    copies = CopiedPayloads(sum(sizes), unit // WORD, torch.cat(rows).to(of.device))
    return gives, stretches, copies
