"""CodecChoice: with which codec a message of one dimension goes, if with any. It moves nothing.

What it looks at is the same on all ranks of a group: the block, the message's size and dtype, the
step, and what the ranks have agreed on, such as a measured link or a guard that tripped.
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
from hybridcomp.errors import ConfigError
from hybridcomp.policy import ONE_WAY, Dimension, Direction, Traffic, directions_of

#: dimensions whose groups are seen as nodes times local ranks
TWO_LEVELS: tuple[Dimension, ...] = ("dp", "zero")


class CodecChoice:
    """One dimension of one engine, as far as codecs, groups and observers of its messages go."""

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
        """Whether any direction of this dimension has a codec."""
        codecs, ways = self._state.policy.codecs, directions_of(self.dimension)
        return any(codecs.get((self.dimension, way)) is not None for way in ways)

    def codec(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        direction: Direction = "forward",
        between: tuple[int, int] | None = None,
    ) -> Codec | None:
        """The codec of a message of ``numel`` elements, None for native.

        Depends on nothing that differs between the ranks of ``group``, or between those two of
        ``between``: the global ranks of sender and receiver, where the message has only these.
        """
        size = self.group(group).size
        if size == 1 and self.error_feedback and not self.is_suspended:
            # a job of more ranks left these out; a sum over one rank sends nothing and adds them
            waits = dtype in VALUE_DTYPES and self._state.residuals.is_restored
            return LOSSLESS if waits else None
        codec = self._choose(numel, dtype, size, direction)
        if codec is not None and self.dimension in self._state.seen.counts:
            self._state.seen.note(self.dimension, codec, numel, dtype, group, direction, between)
            return None
        return codec

    def copy_codec(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
        """The codec of a copy between this rank's device and its host, None for native."""
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
        """Whether the link was found to be faster than the codec. Raises ConfigError where it
        should have been measured before the first message and was not."""
        state, name = self._state, self.dimension
        if not state.is_weighed and name in ONE_WAY and state.config.insists(name):
            todo = (
                "nothing was measured, as this job makes its groups in a way of its own; write "
                '"always"'
            )
            raise ConfigError(f"compression.{name}.when", "auto", todo)
        return bool(state.verdicts.by_dimension) and state.verdicts.native(name, step)

    @property
    def pauses(self) -> bool:
        """Whether a message of this step that stays native comes between encoded ones."""
        return self._state.verdicts.comparing(self._state.step)

    def wants_pieces(self, codec: Codec) -> bool:
        """Whether a reduction with ``codec`` needs to know which parameters a tensor holds."""
        common = bool(self._state.common) and not codec.lossless
        return self.error_feedback or codec.bounded or common

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Everything is native inside; for what is saved. All ranks enter and leave together."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    def group(self, group: ProcessGroup | None) -> Group:
        """What this dimension knows of a process group: rank, size, nodes, levels."""
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
                deep = self.dimension in TWO_LEVELS
                deep = deep and self.dimension not in self._state.policy.low_rank
                found = nodes.group(group, two_levels=deep)
            self._groups[key] = found
        return found

    @property
    def sampling(self) -> bool:
        """Whether messages of this step have their error measured."""
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
        """Measure, in a sampling step, what one encoding of ``values`` leaves out (``Samples``)."""
        if self.sampling:
            self._samples.take(values, codec, direction, cuts, relative_to, residual)

    def meter(self, device: torch.device) -> Meter:
        """A meter for one message on ``device``."""
        clock = HOST if device.type == "cpu" else self._state.clock(device)
        return Meter(clock=clock, where=f"{self.dimension} at step {self._state.step}")

    def native(self, raw_nbytes: int, direction: Direction = "forward") -> None:
        """Write down a message that upstream sends itself; a group of one sends nothing."""
        if raw_nbytes:
            self._state.ledger.record_native((self.dimension, direction), raw_nbytes)

    def _record(self, meter: Meter, raw_nbytes: int, direction: Direction, inter: float) -> None:
        """Write down an encoded message; ``inter``: the share of native's that crosses nodes."""
        self._state.ledger.record((self.dimension, direction), raw_nbytes, meter, inter)


def _exists(group: ProcessGroup | None) -> bool:
    """Whether nobody has destroyed ``group``, which a reference would keep with its threads."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # what torch raises for a destroyed one
        return False
    return True
