"""Choose the codec of a message. It only decides and never touches a tensor.

The choice depends on dimension, direction, dtype, numel, group size and step. All of these are
equal on every rank of the message, so the ranks agree without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.dimensions import Dimension, Direction


class Traffic(NamedTuple):
    """A message, equal on all ranks of its group; a tuple, since it is built for each message."""

    dimension: Dimension
    direction: Direction
    dtype: torch.dtype
    numel: int  # elements of the whole message as upstream passes it on one rank
    world_size: int  # ranks of the group
    step: int  # optimizer steps taken before this message


@dataclass(frozen=True)
class Limits:
    """Limits of the guard for one dimension; a limit of None is not checked."""

    error: float | None  # relative L2 error of one encoding
    residual: float | None  # norm of the residuals over the norm of the values

    @property
    def any(self) -> bool:
        return self.error is not None or self.residual is not None


@dataclass(frozen=True)
class Rung:
    stop: int  # the rung ends this many steps after ``start_step``
    codec: Codec


@dataclass(frozen=True)
class Policy:
    """The codecs of a block, resolved. ``None`` means native."""

    codecs: Mapping[tuple[Dimension, Direction], Codec | None]
    min_bytes: int
    start_step: int
    #: codecs before the final one, in the order of steps
    ramps: Mapping[tuple[Dimension, Direction], tuple[Rung, ...]] = field(default_factory=dict)

    @property
    def low_rank(self) -> frozenset[Dimension]:
        """Return the dimensions whose messages are summed as factors, natively over all ranks."""
        return frozenset(
            name for (name, _), codec in self.codecs.items() if codec and codec.low_rank
        )

    @cached_property
    def settles_at(self) -> int:
        """Return the step from which the choice no longer depends on the step."""
        stops = (rungs[-1].stop for rungs in self.ramps.values() if rungs)
        return self.start_step + max(stops, default=0)

    def choose(self, traffic: Traffic) -> Codec | None:
        """Return the codec for this message; None for native."""
        if traffic.world_size < 2 or traffic.step < self.start_step:
            return None
        if traffic.dtype not in VALUE_DTYPES:
            return None
        if traffic.numel * traffic.dtype.itemsize < self.min_bytes:
            return None
        key = (traffic.dimension, traffic.direction)
        codec = self.codecs.get(key)
        if codec is None:
            return None
        taken = traffic.step - self.start_step
        codec = next((rung.codec for rung in self.ramps.get(key, ()) if taken < rung.stop), codec)
        if not codec.takes(traffic.dtype):
            return None
        return codec.for_message(traffic.numel, traffic.dtype, traffic.world_size)
