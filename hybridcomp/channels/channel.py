"""Channel: one dimension of one engine, the only object that a patch calls.

A patch describes what upstream is about to send as a ``Message`` and hands it over with a way to
send it natively: ``channel.run(message, native=..., encoded=...)``. The channel chooses the codec.
Without one it counts the message and calls ``native``, upstream's original, so that ``none`` is
bit-identical. Otherwise the message encodes its tensors, calls the collective and is recorded in
the ledger. The classes are in ``messages``.

The choice depends on values that are equal on all ranks of a group: the block, the message's size
and dtype, the step, and decisions of all ranks, such as a measured link or a tripped guard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.distributed import ProcessGroup

from hybridcomp.channels.engine_state import EngineState
from hybridcomp.channels.error_samples import Samples, encode_once
from hybridcomp.channels.known_groups import KnownGroups
from hybridcomp.channels.residuals.node_sums import CARRIER
from hybridcomp.codecs import LOSSLESS, Codec
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives import Group, Handle, Meter, ReduceScatterHandle
from hybridcomp.collectives.wire import profiler_ranges
from hybridcomp.collectives.wire.handle import HOST
from hybridcomp.config.policy import Policy, Traffic
from hybridcomp.dimensions import MEASURED_EARLY, ROWS, Dimension, Direction
from hybridcomp.errors import ConfigError

R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", Handle, ReduceScatterHandle)
#: elements, dtype, ranks and direction of a message
_Key = tuple[int, torch.dtype, int, Direction]
#: most messages whose codecs are remembered; the sizes of token messages may differ in every step
MOST_SETTLED = 4096
#: reason shown for a link that should have been measured before the first message
UNMEASURED = (
    'nothing was measured, as this job makes its groups in a way of its own; write "always"'
)


@dataclass(eq=False, kw_only=True)
class Message(ABC, Generic[R]):
    """One message of one dimension; ``R`` is what sending it encoded returns.

    The codec depends on the fields below alone, which are equal on all ranks of ``group``, or on
    the two ranks of ``between``.

    Attributes:
        numel: elements of the message; ``min_bytes`` is compared with their bytes.
        dtype: the dtype that native would send.
        group: the ranks; None: all of the job.
        direction: ``forward`` for activations and for messages with one direction only, else
            ``backward``.
        between: global ranks of sender and receiver of a point-to-point message.
        crosses: for gradients that upstream reduces in every micro-batch: whether this is the
            step's last, in which ``dp.accumulate`` sends their sum to other nodes; None for other
            messages.
    """

    numel: int
    dtype: torch.dtype
    group: ProcessGroup | None
    direction: Direction = "forward"
    between: tuple[int, int] | None = None
    crosses: bool | None = None

    @abstractmethod
    def native_nbytes(self, size: int) -> int:
        """Return the bytes that this rank would send natively in a group of ``size`` ranks."""

    def nbytes_among(self, size: int, ranks: int) -> int:
        """Return the bytes that this rank would send natively in a group of ``ranks`` ranks.

        A job without islands would have this group; in this job its ``size`` ranks sum or gather
        the same values.
        """
        return self.native_nbytes(ranks)

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether native must send the message although it has a codec.

        Asked once for each message with a codec, on all ranks of the group; may be a collective.
        """
        return False

    @abstractmethod
    def send(self, channel: Channel, codec: Codec) -> R:
        """Encode the message with ``codec``, send it over ``group``, and record it."""


class Handling(NamedTuple):
    """Describe how sums with one codec treat the parameters in a tensor.

    Attributes:
        by_parameter: whether the sum has to know which parameters the tensor holds.
        feeds_back: residuals are added to the gradients.
        separate: each parameter is encoded independently of the others.
        common: parameters that tensor-parallel ranks share are summed exactly.
        flush: residuals are sent for the last time. Error feedback is on with lossy codecs only,
            so a lossless one marks such a step.
        sampling: this step measures the error of its messages.
    """

    by_parameter: bool
    feeds_back: bool
    separate: bool
    common: bool
    flush: bool
    sampling: bool


class Channel:
    """One dimension of one engine: chooses codecs, knows groups, samples errors, records.

    Attributes:
        state: what all dimensions of the engine share; seams do not touch it.
        groups: the ``Group`` of each process group, by group and nodes (``group``).
        error_feedback: whether sums add the residuals of earlier sums.
        delta: whether parameters travel as differences from the last gather.
        is_suspended: whether messages are native now; see ``suspended``.
    """

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        self.dimension, self.state = dimension, state
        self.samples = Samples(dimension, state)
        self.error_feedback = state.config.error_feedback(dimension)
        self.delta = dimension == "zero" and state.config.zero.delta
        self.groups = KnownGroups(dimension, state)
        self.is_suspended = False
        self._settled: tuple[Policy | None, dict[_Key, Codec | None]] = (None, {})

    def run(self, message: Message[R], *, native: Callable[[], T], encoded: Callable[[R], T]) -> T:
        """Send ``message`` encoded, or count it and have upstream send it.

        All ranks of the message's group call this with messages that are equal in the fields of
        ``Message``, so all of them send it encoded or all natively.

        Args:
            message: describes what upstream is about to send.
            native: sends it as upstream does.
            encoded: gets the result of the encoded message, usually a handle.

        Returns what ``native`` or ``encoded`` returns.
        """
        if self.dimension == "dp" or message.direction == "backward":
            # every message passes here, so passes are counted here: backward passes, or
            # micro-batches under pp
            running, state = torch._C._current_graph_task_id(), self.state
            if running not in (-1, state.running) or (running == -1 and self.dimension == "pp"):
                state.running = running
                state.passes += 1
                if state.on_pass is not None:
                    state.on_pass(state.passes)
        codec = self.codec(
            message.numel, message.dtype, message.group, message.direction, message.between
        )
        if codec is None and message.crosses is not None and self.accumulates(message):
            codec = CARRIER
        if codec is None or message.stays_native(self, codec):
            return self.run_native(message, native)
        if self.state.islands > 1:
            self._count_spared(message)
        if profiler._is_profiler_enabled:
            fields = message.direction, message.numel, message.dtype
            with profiler_ranges.sending(self.dimension, *fields, codec.spec):
                return encoded(message.send(self, codec))
        return encoded(message.send(self, codec))

    def accumulates(self, message: Message[Any]) -> bool:
        """Return whether gradients like ``message`` are summed over micro-batches inside the node.

        This holds for all messages of a two-level group, also for those that the block leaves
        native: they cross between nodes exactly.
        """
        return (
            message.crosses is not None
            and self.state.config.dp.accumulate == "node"
            and not self.is_suspended
            and message.dtype in VALUE_DTYPES
            and self.group(message.group).levels is not None
        )

    def group(self, group: ProcessGroup | None) -> Group:
        """Return the ``Group`` of a process group: rank, size, nodes, levels."""
        return self.groups[dist.group.WORLD if group is None else group, self.state.nodes]

    def run_native(self, message: Message[Any], native: Callable[[], T]) -> T:
        """Count a message that must stay uncompressed, and have upstream send it."""
        size = self.group(message.group).size
        if self.state.islands > 1:
            self._count_spared(message)
        self.count_native(message.native_nbytes(size), message.direction)
        return native()

    def _count_spared(self, message: Message[Any]) -> None:
        """Record in ``sync`` the further bytes that native would send for this message if the job
        had no islands."""
        islands = self.state.islands
        if self.dimension in MEASURED_EARLY:
            size = self.group(message.group).size
            spared = message.nbytes_among(size, size * islands) - message.native_nbytes(size)
            self.state.ledger.interval["sync", "forward"].raw_nbytes += spared

    def codec(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        direction: Direction = "forward",
        between: tuple[int, int] | None = None,
    ) -> Codec | None:
        """Return the codec of a message with these fields (``Message``), None for native.

        Only for operations that send several messages, such as a ring; all others use ``run``.
        """
        size, state = self.group(group).size, self.state
        if size == 1 and self.error_feedback and not self.is_suspended:
            # a job of more ranks saved residuals: a sum over one rank sends nothing, but adds them
            return LOSSLESS if dtype in VALUE_DTYPES and state.residuals.is_restored else None
        codec = self.choose(numel, dtype, size, direction)
        if codec is not None and self.dimension in state.seen.counts:
            state.seen.note(self.dimension, codec, numel, dtype, group, direction, between)
            return None
        return codec

    def choose(
        self, numel: int, dtype: torch.dtype, ends: int, direction: Direction
    ) -> Codec | None:
        """Return the codec of values that travel between ``ends`` ranks, None for native."""
        if self.is_suspended:
            return None
        step, guard, verdicts = self.state.step, self.state.guard, self.state.verdicts
        policy, key = self.state.policy, (numel, dtype, ends, direction)
        known = self._settled[0] is policy and step >= policy.settles_at
        settled = self._settled[1] if known else {}
        codec = settled[key] if key in settled else self._by_policy(key, step)
        if codec is None:
            return None
        if not self.state.is_weighed and self._insists:
            raise ConfigError(f"compression.{self.dimension}.when", "auto", UNMEASURED)
        too_fast = flushes = False
        if verdicts.by_dimension:
            too_fast = verdicts.native(self.dimension, step)
            flushes = verdicts.flushes(self.dimension, step)
        if guard.trips and guard.native(self.dimension, step):
            return guard.flush(self.dimension, step) if self.error_feedback else None
        if too_fast:
            return LOSSLESS if self.error_feedback and flushes else None
        return codec

    def _by_policy(self, key: _Key, step: int) -> Codec | None:
        """Return the codec that the block chooses; cached per message kind once ramps have
        ended.
        """
        policy, (numel, dtype, ends, direction) = self.state.policy, key
        codec = policy.choose(Traffic(self.dimension, direction, dtype, numel, ends, step))
        if step >= policy.settles_at:
            if self._settled[0] is not policy or len(self._settled[1]) >= MOST_SETTLED:
                self._settled = (policy, {})
            self._settled[1][key] = codec
        return codec

    @cached_property
    def _insists(self) -> bool:
        """Return whether the block asks for a measurement before the first message."""
        return self.dimension in MEASURED_EARLY and self.state.config.insists(self.dimension)

    def encodes(self, numel: int, dtype: torch.dtype, group: ProcessGroup | None) -> bool:
        """Return whether a message has a codec now; equal on all ranks of ``group``."""
        return self.codec(numel, dtype, group) is not None

    def count_native(self, nbytes: int, direction: Direction = "forward") -> None:
        """Count a message of ``nbytes`` that upstream sends itself; do nothing for 0 bytes."""
        if nbytes:
            raw_nbytes = 0 if self.dimension == "sync" else nbytes  # see _count_spared
            self.state.ledger.record_native((self.dimension, direction), nbytes, raw_nbytes)

    @property
    def active(self) -> bool:
        """Return whether any direction of this dimension has a codec."""
        codecs, ways = self.state.policy.codecs, ROWS[self.dimension].directions
        return any(codecs.get((self.dimension, way)) is not None for way in ways)

    @property
    def step(self) -> int:
        """Return the number of optimizer steps taken."""
        return self.state.step

    @property
    def generation(self) -> int:
        """Return the generation of the reference weights of deltas; see ``Channels.resync``."""
        return self.state.generation

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Send all messages inside this context natively, for checkpoints.

        All ranks enter and leave it.
        """
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    def handling(self, codec: Codec) -> Handling:
        """Return how sums with ``codec`` treat the parameters that a tensor holds."""
        common = bool(self.state.common) and not codec.lossless
        separate = codec.bounded or common
        feeds_back = self.error_feedback and codec is not CARRIER
        known = feeds_back or separate
        return Handling(
            known, feeds_back, separate, common, feeds_back and codec.lossless, self.sampling
        )

    @property
    def sampling(self) -> bool:
        """Return whether this step measures the error of its messages."""
        every = self.state.config.ledger.sample_every
        if not every or self.state.step % every:
            return False
        # the comparison's timing must not include extra encodings
        return not self.state.verdicts.comparing(self.state.step)

    def sample(
        self,
        values: Tensor,
        codec: Codec,
        direction: Direction,
        cuts: Sequence[int] = (),
        relative_to: Tensor | None = None,
        residual: Residual | None = None,
    ) -> None:
        """Measure, in a sampling step, the error of one encoding (``encode_once``)."""
        if self.sampling and not codec.lossless and values.numel():
            sums = encode_once(values, codec, cuts, relative_to, residual)
            self.samples.record(direction, sums)

    def meter(self, device: torch.device) -> Meter:
        """Return a meter for one message on ``device``."""
        clock = HOST if device.type == "cpu" else self.state.clock(device)
        kind = profiler_ranges.MarkedMeter if profiler._is_profiler_enabled else Meter
        return kind(clock=clock, where=f"{self.dimension} at step {self.state.step}")

    def record(self, meter: Meter, raw_nbytes: int, direction: Direction, inter: float) -> None:
        """Count an encoded message.

        The native call would have sent ``raw_nbytes``; the share ``inter`` of it crosses nodes.
        """
        raw_nbytes = 0 if self.dimension == "sync" else raw_nbytes
        self.state.ledger.record((self.dimension, direction), raw_nbytes, meter, inter)

    def recorded(
        self, handle: H, meter: Meter, raw_nbytes: int, direction: Direction, inter: float
    ) -> H:
        """``record`` an encoded message once ``handle`` is complete; return ``handle``."""
        raw_nbytes = 0 if self.dimension == "sync" else raw_nbytes
        key = (self.dimension, direction)
        return handle.then(partial(self.state.ledger.record, key, raw_nbytes, meter, inter))
