"""Choice: with which codec a message of one dimension goes, if with any. It moves nothing.

What it looks at is the same on all ranks of a group: the block, the message's size and dtype, the
step, and what the ranks have agreed on, such as a measured link or a guard that tripped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridcomp.codecs.base import Codec
from hybridcomp.errors import ConfigError
from hybridcomp.policy import DIRECTIONS, ONE_WAY, Dimension, Direction, Traffic

if TYPE_CHECKING:
    from hybridcomp.channels.engine_channels import Channels


class Choice:
    """One dimension of one engine, as far as its codecs go."""

    def __init__(self, dimension: Dimension, channels: Channels) -> None:
        self.dimension = dimension
        self._channels = channels
        self.error_feedback = channels.config.error_feedback(dimension)
        self.is_suspended = False

    @property
    def active(self) -> bool:
        """Whether any direction of this dimension has a codec."""
        codecs = self._channels.policy.codecs
        return any(codecs.get((self.dimension, way)) is not None for way in DIRECTIONS)

    def codec(
        self,
        numel: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        direction: Direction = "forward",
        hop: tuple[int, int] | None = None,
    ) -> Codec | None:
        """The codec of a message of ``numel`` elements, None for native.

        Depends on nothing that differs between the ranks of ``group``, or of ``hop``: the global
        ranks of sender and receiver, where the message has only those two.
        """
        codec = self._choose(numel, dtype, dist.get_world_size(group), direction)
        if codec is not None and self.dimension in self._channels.seen.waiting:
            self._channels.seen.note(self.dimension, codec, numel, dtype, group, direction, hop)
            return None
        return codec

    def copy_codec(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
        """The codec of a copy between this rank's device and its host, None for native."""
        start = self._channels.policy.start_step
        if not self._channels.host.pace.encodes(direction, self._channels.step, start):
            return None
        return self._choose(numel, dtype, 2, direction)  # two ends

    def _choose(
        self, numel: int, dtype: torch.dtype, ends: int, direction: Direction
    ) -> Codec | None:
        if self.is_suspended:
            return None
        step, guard = self._channels.step, self._channels.guard
        codec = self._channels.policy.choose(
            Traffic(
                dimension=self.dimension,
                direction=direction,
                dtype=dtype,
                numel=numel,
                world_size=ends,
                step=step,
            )
        )
        if codec is None:
            return None
        too_fast, flushes = self._too_fast(step), self._channels.link.flushes(self.dimension, step)
        if guard.native(self.dimension, step):
            return guard.flush(self.dimension, step) if self.error_feedback else None
        if too_fast:
            return guard.lossless if self.error_feedback and flushes else None
        return codec

    def _too_fast(self, step: int) -> bool:
        """Whether the link was found to be faster than the codec. Raises ConfigError where it
        should have been measured before the first message and was not."""
        channels, name = self._channels, self.dimension
        if not channels.is_weighed and name in ONE_WAY and name in channels.config.measured():
            todo = (
                "nothing was measured, as this job makes its groups in a way of its own; write "
                '"always"'
            )
            raise ConfigError(f"compression.{name}.when", "auto", todo)
        return channels.link.native(name, step)

    @property
    def pauses(self) -> bool:
        """Whether a message of this step that stays native comes between encoded ones."""
        return self._channels.link.comparing(self._channels.step)

    def wants_pieces(self, codec: Codec) -> bool:
        """Whether a reduction with ``codec`` needs to know which parameters a tensor holds."""
        common = bool(self._channels.common) and not codec.lossless
        return self.error_feedback or codec.bounded or common

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Everything is native inside; for what is saved. All ranks enter and leave together."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False
