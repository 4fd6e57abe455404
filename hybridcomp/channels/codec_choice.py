"""Choose the codec of each message of one dimension, or none; sends nothing.

The choice depends only on what is equal on all ranks of a group: the block, the message's size and
dtype, the step, and decisions the ranks agreed on, such as a measured link or a tripped guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.channels.engine_state import EngineState
from hybridcomp.channels.error_samples import Samples
from hybridcomp.codecs import LOSSLESS, Codec
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.topology import Nodes
from hybridcomp.collectives.wire import HOST
from hybridcomp.dimensions import MEASURED_EARLY, ROWS
from hybridcomp.errors import ConfigError
from hybridcomp.policy import Dimension, Direction, Traffic


class CodecChoice:
    """Codecs, groups and observers of the messages of one dimension of one engine."""

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        self.dimension = dimension
        self._state = state
        self.error_feedback = state.config.error_feedback(dimension)
        self.is_suspended = False
        self._samples = Samples(dimension, state)
        self._groups: dict[ProcessGroup | None, Group] = {}
        self._placed: Nodes | None = None  # the nodes that ``_groups`` know

    @property
    def active(self) -> bool:
        """Return whether any direction of this dimension has a codec."""
        codecs, ways = self._state.policy.codecs, ROWS[self.dimension].directions
        return any(codecs.get((self.dimension, way)) is not None for way in ways)

    def codec(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        direction: Direction = "forward",
        between: tuple[int, int] | None = None,
    ) -> Codec | None:
        """Return the codec of a message of ``numel`` elements, None for native.

        Equal on all ranks of ``group``, or on both of ``between``: the global ranks of sender and
        receiver of a point-to-point message.
        """
        size = self.group(group).size
        if size == 1 and self.error_feedback and not self.is_suspended:
            # residuals saved by a job of more ranks: a sum over one rank sends nothing, adds them
            waits = dtype in VALUE_DTYPES and self._state.residuals.is_restored
            return LOSSLESS if waits else None
        codec = self._choose(numel, dtype, size, direction)
        if codec is not None and self.dimension in self._state.seen.counts:
            self._state.seen.note(self.dimension, codec, numel, dtype, group, direction, between)
            return None
        return codec

    def copy_codec(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
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
        codec = self._state.policy.choose(
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
        too_fast, flushes = self._too_fast(step), False
        if verdicts.by_dimension:
            flushes = verdicts.flushes(self.dimension, step)
        if guard.trips and guard.native(self.dimension, step):
            return guard.flush(self.dimension, step) if self.error_feedback else None
        if too_fast:
            return guard.lossless if self.error_feedback and flushes else None
        return codec

    def _too_fast(self, step: int) -> bool:
        """Return whether the link was measured to be faster than the codec. Raises ConfigError
        where it should have been measured before the first message and was not."""
        state, name = self._state, self.dimension
        if not state.is_weighed and name in MEASURED_EARLY and state.config.insists(name):
            todo = (
                "nothing was measured, as this job makes its groups in a way of its own; write "
                '"always"'
            )
            raise ConfigError(f"compression.{name}.when", "auto", todo)
        return bool(state.verdicts.by_dimension) and state.verdicts.native(name, step)

    @property
    def pauses(self) -> bool:
        """Return whether this step is compared with others: native now, maybe encoded soon."""
        return self._state.verdicts.comparing(self._state.step)

    def wants_pieces(self, codec: Codec) -> bool:
        """Return whether a reduction with ``codec`` needs the parameters that a tensor holds."""
        common = bool(self._state.common) and not codec.lossless
        return self.error_feedback or codec.bounded or common

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Send messages inside natively, for checkpoints. All ranks enter and leave together."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    def group(self, group: ProcessGroup | None) -> Group:
        """Return the ``Group`` of a process group: rank, size, nodes, levels."""
        nodes = self._state.nodes
        if nodes is not self._placed:
            self._groups.clear()
            self._placed = nodes
        key = dist.group.WORLD if group is None else group
        found = self._groups.get(key)
        if found is None:
            for gone in [known for known in self._groups if not _exists(known)]:
                del self._groups[gone]
            if nodes is None:
                found = Group.of(group)
            else:
                # residuals of low-rank sums cover whole messages, also where a flush sends them
                deep = ROWS[self.dimension].two_levels
                deep = deep and self.dimension not in self._state.policy.low_rank
                found = nodes.group(group, two_levels=deep)
            self._groups[key] = found
        return found

    @property
    def sampling(self) -> bool:
        """Return whether this step measures the error of its messages."""
        every = self._state.config.ledger.sample_every
        if not every or self._state.step % every:
            return False
        return not self._state.verdicts.comparing(self._state.step)  # it would be in what is timed

    def sample(
        self,
        values: Tensor,
        codec: Codec,
        direction: Direction,
        cuts: Sequence[int] = (),
        relative_to: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """Measure, in a sampling step, the error of one encoding of ``values`` (``Samples``)."""
        if self.sampling:
            self._samples.take(values, codec, direction, cuts, relative_to, residual)

    def meter(self, device: torch.device) -> Meter:
        """Return a meter for one message on ``device``."""
        clock = HOST if device.type == "cpu" else self._state.clock(device)
        return Meter(clock=clock, where=f"{self.dimension} at step {self._state.step}")

    def native(self, raw_nbytes: int, direction: Direction = "forward") -> None:
        """Count a message of ``raw_nbytes`` that upstream sends itself; 0: it sends nothing."""
        if raw_nbytes:
            self._state.ledger.record_native((self.dimension, direction), raw_nbytes)

    def _record(self, meter: Meter, raw_nbytes: int, direction: Direction, inter: float) -> None:
        """Count an encoded message; ``inter``: the share of native bytes that crosses nodes."""
        self._state.ledger.record((self.dimension, direction), raw_nbytes, meter, inter)


def _exists(group: ProcessGroup | None) -> bool:
    """Return whether ``group`` still exists; a reference to a destroyed one keeps its threads."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # what torch raises for a destroyed one
        return False
    return True
