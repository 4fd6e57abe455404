"""Price one message: bytes on the wire, seconds of the link, and seconds of its codec.

Native messages take the seconds that the cluster measured. Encoded ones are the collectives of
``hybridcomp.collectives``: their coding, the messages that carry the payloads, and the overhead of
a call. Over several nodes with several ranks on each, ``dp`` and ``zero`` go in two levels
(``collectives.hierarchical``): native inside a node, encoded between nodes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.native_nbytes import (
    all_gather_nbytes,
    all_reduce_nbytes,
    all_to_all_nbytes,
    reduce_scatter_nbytes,
)
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import HybridcompError
from hybridcomp.plan.choices import Choice
from hybridcomp.plan.cost.copies import Copying
from hybridcomp.plan.machines import rings
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.estimates import Estimate
from hybridcomp.plan.machines.rows import Direction, Operation

NOTHING = Estimate(0.0, 0.0, 0.0)
#: messages of fewer bytes stay native: the block's default of ``min_bytes``
MIN_BYTES = 65536
#: directions of a codec on the sender and on the receiver
CODING: tuple[Direction, Direction] = ("encode", "decode")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Price:
    """Cost of one message, or of several together, on one rank.

    coding: seconds of the device in encoding and decoding, calls included. wire: seconds of the
    link between nodes. inside: seconds of the link inside a node, and of its native messages that
    go with an encoded one; of a copy to or from the host, those of the bus and of the host's codec.
    nbytes, native_nbytes: bytes that this rank sends to others, as sent, and as native messages
    would be. between_nbytes, between_native_nbytes: the part of both that goes to other nodes.
    """

    coding: Estimate = NOTHING
    wire: Estimate = NOTHING
    inside: Estimate = NOTHING
    nbytes: float = 0.0
    native_nbytes: float = 0.0
    between_nbytes: float = 0.0
    between_native_nbytes: float = 0.0

    def plus(self, other: Price) -> Price:
        """Return the sum of both prices."""
        return Price(
            self.coding.plus(other.coding), self.wire.plus(other.wire),
            self.inside.plus(other.inside), self.nbytes + other.nbytes,
            self.native_nbytes + other.native_nbytes,
            self.between_nbytes + other.between_nbytes,
            self.between_native_nbytes + other.between_native_nbytes,
        )  # fmt: skip

    def times(self, count: float) -> Price:
        """Return the price of ``count`` such messages."""
        return Price(
            self.coding.times(count), self.wire.times(count), self.inside.times(count),
            count * self.nbytes, count * self.native_nbytes,
            count * self.between_nbytes, count * self.between_native_nbytes,
        )  # fmt: skip

    @property
    def seconds(self) -> Estimate:
        """Seconds of coding, wire and messages inside the node, in series."""
        return self.coding.plus(self.wire).plus(self.inside)


FREE = Price()


class Coded(NamedTuple):
    """Average calls of a codec a message; each codes this share of the message's values."""

    direction: Direction
    calls: float
    share: float


@dataclass(frozen=True)
class EngineCall:
    """A collective or a send as the engine calls it.

    operation: the engine's. encoded_as: the collective that replaces it where it is encoded (a
    bucket of which every rank keeps only its part is reduce-scattered). numel: values, counted as
    in ``rows``. ranks, nodes: of its group. two_levels: whether ``hierarchy`` applies. coded: calls
    of the codec, where they are not those of its collective.
    """

    operation: Operation
    numel: float
    ranks: int
    nodes: int
    encoded_as: Operation | None = None
    two_levels: bool = False
    coded: tuple[Coded, ...] | None = None


@dataclass(frozen=True, eq=False)
class Prices:
    """The prices of a cluster for messages of one dtype; each is computed once."""

    cluster: Cluster
    _known: dict[tuple[object, ...], Price] = field(default_factory=dict, repr=False)

    def of(
        self, call: EngineCall | Copying, choice: Choice, dtype: torch.dtype,
        dimension: Dimension | None = None,
    ) -> Price:  # fmt: skip
        """Price ``call`` on one rank. Raises HybridcompError where a measurement is missing.

        ``dimension``: the one whose channel sends it; None: only the collective counts.
        """
        key = call, choice, dtype, dimension
        if key not in self._known:
            if isinstance(call, Copying):
                self._known[key] = self._copied(call, choice, dtype)
            else:
                self._known[key] = self._price(call, choice, dtype, dimension or "")
        return self._known[key]

    def knows(self, choice: Choice, dtype: torch.dtype, copied: bool = False) -> bool:
        """Return whether the codec of ``choice`` has measured speeds.

        ``copied``: on the host too, for copies, where the host's codecs were measured at all.
        """
        if choice.codec is None:
            return True
        spec, name = _timed(choice.codec, dtype), NAMES[dtype]
        on_host = copied and self.cluster.codes_on_host
        places = [(name, False), *((one, True) for one in (name, "fp32") if on_host)]
        try:
            for kind, host in places:
                for direction in CODING:
                    self.cluster.coding(spec, kind, 1, direction, on_host=host)
        except HybridcompError:
            return False
        return True

    def _price(self, call: EngineCall, choice: Choice, dtype: torch.dtype, dimension: str) -> Price:
        if call.ranks < 2 or not call.numel:
            return FREE
        native = native_nbytes(call.operation, call.numel, dtype, call.ranks)
        if choice.native or call.numel * dtype.itemsize < MIN_BYTES:
            found = self._native(call, call.operation, dtype, native)
            return found.plus(self._channel(call, dimension))
        local = call.ranks / call.nodes
        if call.two_levels and call.nodes > 1 and local > 1:
            return self._two_levels(call, choice, dtype, native)
        return self._encoded(call, choice, dtype, native, dimension)

    def _channel(self, call: EngineCall, dimension: str) -> Price:
        """Price the overhead of a channel for a message that stays native."""
        busy = self._busy(call.ranks)
        more = self.cluster.channel_seconds(call.operation, call.ranks, call.nodes, dimension, busy)
        return Price(wire=more) if call.nodes > 1 else Price(inside=more)

    def _busy(self, ranks: int) -> bool:
        """Return whether there are other groups beside one of ``ranks``."""
        return self.cluster.world_size > ranks

    def _native(
        self, call: EngineCall, operation: Operation, dtype: torch.dtype, native: float
    ) -> Price:
        nbytes = call.numel * dtype.itemsize
        seconds = self._seconds(operation, nbytes, call.ranks, call.nodes)
        where = {"wire": seconds} if call.nodes > 1 else {"inside": seconds}
        crossing = _crossing(call, dtype)
        return Price(
            nbytes=native, native_nbytes=native, between_nbytes=crossing,
            between_native_nbytes=crossing, **where,
        )  # fmt: skip

    def _seconds(self, operation: Operation, nbytes: float, ranks: int, nodes: int) -> Estimate:
        """A native message beside those of all other groups, where there are others."""
        return self.cluster.seconds(operation, nbytes, ranks, nodes, busy=self._busy(ranks))

    def _encoded(
        self,
        call: EngineCall,
        choice: Choice,
        dtype: torch.dtype,
        native: float,
        dimension: str = "",
    ) -> Price:
        """Price an encoded message: (1) coding, (2) payloads, (3) overhead of a call, (4) bytes."""
        codec, operation = choice.codec, call.encoded_as or call.operation
        assert codec is not None
        payload = call.numel * choice.bits(dtype) / 8
        shape = rings.encoded_shape(operation, call.ranks)
        coded = call.coded or tuple(Coded(way, 1.0, share) for way, share in shape.coded)
        # 1.
        timed, name = _timed(codec, dtype), NAMES[dtype]
        coding = Estimate.total(
            self.cluster.coding(timed, name, one.share * call.numel, one.direction)
            .times(one.calls) for one in coded
        )  # fmt: skip
        # 2.
        wire = Estimate.total(
            self._seconds(part, share * payload, call.ranks, call.nodes)
            for part, share in shape.sent
        )
        # 3.
        busy = self._busy(call.ranks)
        extra = self.cluster.overhead(
            operation, call.ranks, call.nodes, codec.spec, dimension, busy
        )
        coding = coding.times(extra.factor).plus(extra.host)
        wire = wire.times(extra.factor)
        # 4.
        sent = native_nbytes(operation, call.numel, dtype, call.ranks)
        nbytes = sent * choice.bits(dtype) / (8 * dtype.itemsize)
        where = {"wire": wire} if call.nodes > 1 else {"inside": wire}
        crossing = sum(
            rings.crossing_nbytes(part, share * payload, call.ranks, call.nodes)
            for part, share in shape.sent
        )
        return Price(
            coding=coding, nbytes=nbytes, native_nbytes=native, between_nbytes=crossing,
            between_native_nbytes=_crossing(call, dtype), **where,
        )  # fmt: skip

    def _copied(self, call: Copying, choice: Choice, dtype: torch.dtype) -> Price:
        """Price a copy between device and host; native bytes include sums that upstream fetches."""
        cluster, codec = self.cluster, choice.codec
        native = call.nbytes + call.back_nbytes
        to_host = call.direction == "to_host"
        if codec is None or call.numel * dtype.itemsize < MIN_BYTES:
            there, back = call.busiest or (call.nbytes, call.back_nbytes)
            bus = cluster.copy(call.direction, there)
            if back:
                bus = bus.plus(cluster.copy("to_device", back))
            return Price(inside=bus, nbytes=native, native_nbytes=native)
        payload, name = call.numel * choice.bits(dtype) / 8, NAMES[dtype]
        # master weights are encoded from fp32, without a cast, where payload sizes are fixed
        own = "fp32" if codec.fixed_size and not (to_host or codec.lossless) else name
        sender, receiver = CODING
        mine, others = (sender, receiver) if to_host else (receiver, sender)
        device = cluster.coding(_timed(codec, dtype), name, call.numel, mine)
        host = cluster.coding(_timed(codec, dtype), own, call.numel, others, on_host=True)
        bus = cluster.copy(call.direction, payload)
        return Price(device, inside=bus.plus(host), nbytes=payload, native_nbytes=native)

    def _two_levels(
        self, call: EngineCall, choice: Choice, dtype: torch.dtype, native: float
    ) -> Price:
        """Price a two-level message: native inside a node, encoded stretches between nodes."""
        local = round(call.ranks / call.nodes)
        operation = call.encoded_as or call.operation
        stretch = EngineCall(operation, call.numel / local, call.nodes, call.nodes)
        between = self._encoded(stretch, choice, dtype, 0.0)
        parts: tuple[Operation, ...] = ("all_to_all", "all_gather")
        if operation == "reduce_scatter":
            parts = ("all_to_all",)
        elif operation == "all_gather":
            parts = ("all_gather",)
        found = Price(
            between.coding, between.wire, NOTHING, between.nbytes, native, between.between_nbytes,
            _crossing(call, dtype),
        )  # fmt: skip
        for part in parts:
            inner = EngineCall(part, call.numel, local, 1)
            own = native_nbytes(part, call.numel, dtype, local)
            found = found.plus(Price(
                inside=self._native(inner, part, dtype, own).inside, nbytes=own
            ))  # fmt: skip
        return found


@functools.lru_cache(maxsize=4096)
def _timed(codec: Codec, dtype: torch.dtype) -> str:
    """Return the setting whose speed is that of ``codec``: an error bound runs another codec."""
    return codec.split_error_budget(1, 2, result=dtype)[0].spec if codec.bounded else codec.spec


def _crossing(call: EngineCall, dtype: torch.dtype) -> float:
    """Return the bytes that a rank sends to other nodes where ``call`` stays native."""
    nbytes = call.numel * dtype.itemsize
    return rings.crossing_nbytes(call.operation, nbytes, call.ranks, call.nodes)


@functools.lru_cache(maxsize=65536)
def native_nbytes(operation: Operation, numel: float, dtype: torch.dtype, ranks: int) -> float:
    """Return the bytes one rank sends to others natively, counted as the ledger's ``raw_MB``."""
    whole = round(numel)
    if operation == "all_reduce":
        return float(all_reduce_nbytes(whole, dtype, ranks))
    if operation == "all_gather":
        return float(all_gather_nbytes(round(numel / ranks), dtype, ranks))
    if operation == "reduce_scatter":
        return float(reduce_scatter_nbytes(whole, dtype, ranks))
    if operation == "all_to_all":
        return float(all_to_all_nbytes(whole, dtype, ranks))
    return float(whole * dtype.itemsize)
