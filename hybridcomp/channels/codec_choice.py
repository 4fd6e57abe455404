"""Choose the codec of each message of one dimension, or none; sends nothing.

The choice depends only on what is equal on all ranks of a group: the block, the message's size and
dtype, the step, and decisions the ranks agreed on, such as a measured link or a tripped guard.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch.distributed import ProcessGroup

from hybridcomp.channels.engine_state import EngineState
from hybridcomp.codecs import LOSSLESS, Codec
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.dimensions import MEASURED_EARLY
from hybridcomp.errors import ConfigError
from hybridcomp.policy import Dimension, Direction, Policy, Traffic

#: elements, dtype, ranks and direction of a message
_Key = tuple[int, torch.dtype, int, Direction]
#: most messages whose codecs are remembered; sizes may differ at every step, as of tokens
MOST_SETTLED = 4096


class CodecChoice:
    """Chooser of the codecs of one dimension of one engine.

    Attributes:
        is_suspended: whether all messages are native now, as for checkpoints.
    """

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        self._dimension, self._state = dimension, state
        self._error_feedback = state.config.error_feedback(dimension)
        self.is_suspended = False
        self._settled: tuple[Policy | None, dict[_Key, Codec | None]] = (None, {})

    @functools.cached_property
    def _insists(self) -> bool:
        """Return whether the block asks for a measurement before the first message."""
        return self._dimension in MEASURED_EARLY and self._state.config.insists(self._dimension)

    def of_message(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        size: int,
        direction: Direction,
        between: tuple[int, int] | None,
    ) -> Codec | None:
        """Return the codec of a message in a group of ``size`` ranks; see ``Message``."""
        if size == 1 and self._error_feedback and not self.is_suspended:
            # residuals saved by a job of more ranks: a sum over one rank sends nothing, adds them
            waits = dtype in VALUE_DTYPES and self._state.residuals.is_restored
            return LOSSLESS if waits else None
        codec = self._choose(numel, dtype, size, direction)
        if codec is not None and self._dimension in self._state.seen.counts:
            self._state.seen.note(self._dimension, codec, numel, dtype, group, direction, between)
            return None
        return codec

    def of_copy(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
        """Return the codec of a copy between this rank's device and its host, None for native."""
        start = self._state.policy.start_step
        if not self._state.pace.encodes(direction, self._state.step, start):
            return None
        return self._choose(numel, dtype, 2, direction)  # two ends

    def _choose(
        self, numel: int, dtype: torch.dtype, ends: int, direction: Direction
    ) -> Codec | None:
        if self.is_suspended:
            return None
        step, guard, verdicts = self._state.step, self._state.guard, self._state.verdicts
        policy, key = self._state.policy, (numel, dtype, ends, direction)
        known = self._settled[0] is policy and step >= policy.settles_at
        settled = self._settled[1] if known else {}
        codec = settled[key] if key in settled else self._by_policy(key, step)
        if codec is None:
            return None
        if self._insists and not self._state.is_weighed:
            self._refuse()
        too_fast = flushes = False
        if verdicts.by_dimension:
            too_fast = verdicts.native(self._dimension, step)
            flushes = verdicts.flushes(self._dimension, step)
        if guard.trips and guard.native(self._dimension, step):
            return guard.flush(self._dimension, step) if self._error_feedback else None
        if too_fast:
            return guard.lossless if self._error_feedback and flushes else None
        return codec

    def _by_policy(self, key: _Key, step: int) -> Codec | None:
        """Return what the block says; asked once for all messages alike, once no ramp is left."""
        policy, (numel, dtype, ends, direction) = self._state.policy, key
        codec = policy.choose(Traffic(self._dimension, direction, dtype, numel, ends, step))
        if step >= policy.settles_at:
            if self._settled[0] is not policy or len(self._settled[1]) >= MOST_SETTLED:
                self._settled = (policy, {})
            self._settled[1][key] = codec
        return codec

    def _refuse(self) -> NoReturn:
        """Raise ConfigError: the link should have been measured before the first message."""
        todo = (
            'nothing was measured, as this job makes its groups in a way of its own; write "always"'
        )
        raise ConfigError(f"compression.{self._dimension}.when", "auto", todo)
