"""Message: what a seam hands to ``Channel.run``, one class for each operation.

A seam describes what upstream is about to send. The channel chooses the codec; where there is one
the message sends itself through the channel, else upstream sends it and the channel counts what
``native_nbytes`` says. Classes: sums in ``sums``, messages that only move values in ``moves``,
broadcasts and reductions to one rank in ``broadcast_reduce``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from hybridcomp.codecs.base import Codec
from hybridcomp.policy import Direction

if TYPE_CHECKING:
    from hybridcomp.channels.channel import Channel

R = TypeVar("R")


@dataclass(eq=False, kw_only=True)
class Message(ABC, Generic[R]):
    """One message of one dimension; ``R`` is what sending it encoded returns.

    The codec depends on the fields below alone, which are equal on all ranks of ``group``, or on
    the two ranks of ``between``.

    Attributes:
        numel: elements, by which ``min_bytes`` is held.
        dtype: the dtype that native would send.
        group: the ranks; None: all of the job.
        direction: ``forward`` for activations and all that has no other way, else ``backward``.
        between: global ranks of sender and receiver of a point-to-point message.
    """

    numel: int
    dtype: torch.dtype
    group: ProcessGroup | None
    direction: Direction = "forward"
    between: tuple[int, int] | None = None

    @abstractmethod
    def native_nbytes(self, size: int) -> int:
        """Return the bytes that this rank would send natively in a group of ``size`` ranks."""

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether native must send the message although it has a codec.

        Asked once for each message with a codec, on all ranks of the group; may be a collective.
        """
        return False

    @abstractmethod
    def send(self, channel: Channel, codec: Codec) -> R:
        """Encode the message with ``codec``, send it over ``group``, and record it."""
