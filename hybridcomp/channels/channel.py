"""Channel: one dimension of one engine, the only object that a patch calls.

A patch describes what upstream is about to send as a ``Message`` and hands it over with a way to
send it natively: ``channel.run(message, native=..., encoded=...)``. The channel chooses the codec.
Without one it counts the message and calls ``native``, upstream's original, so that ``none`` is
bit-identical. Otherwise the message encodes its tensors, calls the collective and is recorded in
the ledger. Its classes: sums in ``sums`` and ``scatter_sums``, messages that only move values in
``moves``, broadcasts and reductions to one rank in ``broadcast_reduce``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp import collectives
from hybridcomp.channels.codec_choice import CodecChoice
from hybridcomp.channels.engine_state import ATTRIBUTE, EngineState
from hybridcomp.channels.error_samples import Samples
from hybridcomp.channels.known_groups import KnownGroups
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives import Group, Handle, Meter, ReduceScatterHandle
from hybridcomp.collectives.ring import Ring
from hybridcomp.collectives.wire import HOST
from hybridcomp.dimensions import ROWS, Dimension, Direction

R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", Handle, ReduceScatterHandle)


def channel_of(obj: Any, dimension: Dimension) -> Channel | None:
    """Return the channel of an attached engine or of an object tagged with it, None without one."""
    channels = getattr(obj, ATTRIBUTE, None)
    if channels is None:
        return None
    return cast("Channel", channels.by_dimension[dimension])


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


class Handling(NamedTuple):
    """Treatment, by sums with one codec, of the parameters that a tensor holds.

    Attributes:
        by_parameter: whether they must be known at all.
        separate: they are encoded independently of each other.
        common: those that tensor-parallel ranks share are summed exactly.
        flush: residuals are sent for the last time. Error feedback is on with lossy codecs only,
            so a lossless one marks such a step.
        sampling: this step measures the error of its messages.
    """

    by_parameter: bool
    separate: bool
    common: bool
    flush: bool
    sampling: bool


class Channel:
    """One dimension of one engine: chooses codecs, knows groups, samples errors, records.

    Attributes:
        state: what all dimensions of the engine share; seams do not touch it.
        choice: chooses the codecs.
        groups: what is known of process groups, by group and nodes (``group``).
        error_feedback: whether sums add what earlier ones have left out.
        delta: whether parameters travel as differences from the last gather.
    """

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        self.dimension, self.state = dimension, state
        self.choice = CodecChoice(dimension, state)
        self.samples = Samples(dimension, state)
        self.error_feedback = state.config.error_feedback(dimension)
        self.delta = dimension == "zero" and state.config.zero.delta
        self.groups = KnownGroups(dimension, state)

    def run(self, message: Message[R], *, native: Callable[[], T], encoded: Callable[[R], T]) -> T:
        """Send ``message`` encoded, or count it and have upstream send it.

        All ranks of the message's group call this with messages that are equal in the fields of
        ``Message``, and take the same way.

        Args:
            message: describes what upstream is about to send.
            native: sends it as upstream does.
            encoded: gets the result of the encoded message, usually a handle.

        Returns what ``native`` or ``encoded`` returns.
        """
        size = self.group(message.group).size
        codec = self.choice.of_message(
            message.numel, message.dtype, message.group, size, message.direction, message.between
        )
        if codec is None or message.stays_native(self, codec):
            return self.run_native(message, native)
        return encoded(message.send(self, codec))

    def group(self, group: ProcessGroup | None) -> Group:
        """Return the ``Group`` of a process group: rank, size, nodes, levels."""
        return self.groups[dist.group.WORLD if group is None else group, self.state.nodes]

    def run_native(self, message: Message[Any], native: Callable[[], T]) -> T:
        """Count a message that no codec may change, and have upstream send it."""
        size = self.group(message.group).size
        self.count_native(message.native_nbytes(size), message.direction)
        return native()

    def codec(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        direction: Direction = "forward",
        between: tuple[int, int] | None = None,
    ) -> Codec | None:
        """Return the codec of a message with these fields (``Message``), None for native.

        For messages that consist of several, as a ring's; all others go through ``run``.
        """
        size = self.group(group).size
        return self.choice.of_message(numel, dtype, group, size, direction, between)

    def copy_codec(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
        """Return the codec of a copy between this rank's device and its host, None for native."""
        return self.choice.of_copy(numel, dtype, direction)

    def encodes(self, numel: int, dtype: torch.dtype, group: ProcessGroup | None) -> bool:
        """Return whether a message has a codec now; equal on all ranks of ``group``."""
        return self.codec(numel, dtype, group) is not None

    def count_native(self, nbytes: int, direction: Direction = "forward") -> None:
        """Count a message of ``nbytes`` that upstream sends itself; 0: it sends nothing."""
        if nbytes:
            self.state.ledger.record_native((self.dimension, direction), nbytes)

    @property
    def active(self) -> bool:
        """Return whether any direction of this dimension has a codec."""
        codecs, ways = self.state.policy.codecs, ROWS[self.dimension].directions
        return any(codecs.get((self.dimension, way)) is not None for way in ways)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.state.step

    @property
    def generation(self) -> int:
        """The generation of the references of deltas; see ``Channels.resync``."""
        return self.state.generation

    @property
    def exact_step(self) -> bool:
        """Return whether this step gathers exact parameters, as ``resync_every`` asks."""
        every = self.state.config.zero.resync_every
        return every > 0 and self.step % every == 0

    @property
    def pauses(self) -> bool:
        """Return whether this step is compared with others: native now, maybe encoded soon."""
        return self.state.verdicts.comparing(self.state.step)

    @property
    def is_suspended(self) -> bool:
        """Return whether messages are native now; see ``suspended``."""
        return self.choice.is_suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Send messages inside natively, for checkpoints. All ranks enter and leave together."""
        self.choice.is_suspended = True
        try:
            yield
        finally:
            self.choice.is_suspended = False

    def handling(self, codec: Codec) -> Handling:
        """Return how sums with ``codec`` treat the parameters that a tensor holds."""
        common = bool(self.state.common) and not codec.lossless
        separate = codec.bounded or common
        flush = self.error_feedback and codec.lossless
        known = self.error_feedback or separate
        return Handling(known, separate, common, flush, self.sampling)

    @property
    def sampling(self) -> bool:
        """Return whether this step measures the error of its messages."""
        every = self.state.config.ledger.sample_every
        if not every or self.state.step % every:
            return False
        return not self.state.verdicts.comparing(self.state.step)  # it would be in what is timed

    def sample(
        self,
        values: Tensor,
        codec: Codec,
        direction: Direction,
        cuts: Sequence[int] = (),
        relative_to: Tensor | None = None,
        residual: Residual | None = None,
    ) -> None:
        """Measure, in a sampling step, the error of one encoding of ``values`` (``Samples``)."""
        if self.sampling:
            self.samples.take(values, codec, direction, cuts, relative_to, residual)

    def meter(self, device: torch.device) -> Meter:
        """Return a meter for one message on ``device``."""
        clock = HOST if device.type == "cpu" else self.state.clock(device)
        return Meter(clock=clock, where=f"{self.dimension} at step {self.state.step}")

    def ring(self, codec: Codec | None, group: ProcessGroup | None, device: torch.device) -> Ring:
        """Return the ``Ring`` that sends ring attention's messages round ``group``.

        Call ``record_ring_traffic`` once it has finished.
        """
        return Ring(codec, self.group(group), self.meter(device), device)

    def record_ring_traffic(self, ring: Ring, raw_nbytes: int, direction: Direction) -> None:
        """Record the messages of a finished ring; ``raw_nbytes``: bytes native would have sent.

        Without a codec the ring sends just these, plus headers.
        """
        if ring.codec is None:
            self.count_native(raw_nbytes, direction)
            self.state.ledger.record_time((self.dimension, direction), ring.meter)
            return
        ring.meter.used[ring.codec.spec] = None
        self.record(ring.meter, raw_nbytes, direction, ring.group.ring)

    def gather_words(self, words: Tensor, group: ProcessGroup | None) -> list[list[int]]:
        """Gather the int64 ``words`` of all ranks, beside a message of upstream; blocking."""
        meter = self.meter(words.device)
        rows = collectives.gather_words(words, self.group(group), meter)
        self.state.ledger.record_extra((self.dimension, "forward"), meter)
        return rows

    def record(self, meter: Meter, raw_nbytes: int, direction: Direction, inter: float) -> None:
        """Count an encoded message in whose place native would have sent ``raw_nbytes``, of which
        the share ``inter`` crosses nodes."""
        self.state.ledger.record((self.dimension, direction), raw_nbytes, meter, inter)

    def recorded(
        self, handle: H, meter: Meter, raw_nbytes: int, direction: Direction, inter: float
    ) -> H:
        """``record`` an encoded message once ``handle`` is complete; return ``handle``."""
        key = (self.dimension, direction)
        return handle.then(partial(self.state.ledger.record, key, raw_nbytes, meter, inter))
