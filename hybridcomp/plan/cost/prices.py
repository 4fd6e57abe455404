"""What one message costs: bytes on the wire, seconds of the link, and seconds in its codec.

Native messages cost what the cluster says. Encoded ones are the collectives of
``hybridcomp.collectives``: their coding, the messages that carry the payloads, and what a call
costs beside them. Over several nodes with several ranks on each, ``dp`` and ``zero`` go in two
levels (``collectives.hierarchical``): native inside a node, encoded between nodes.
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
from hybridcomp.errors import HybridcompError
from hybridcomp.plan.choices import Choice
from hybridcomp.plan.cost.copies import Copying
from hybridcomp.plan.machines import rings
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.figures import Figure
from hybridcomp.plan.machines.rows import Direction, Operation
from hybridcomp.policy import Dimension

NOTHING = Figure(0.0, 0.0, 0.0)
#: messages of fewer bytes stay native: the block's own default of ``min_bytes``
MIN_BYTES = 65536
#: what a sender and a receiver do
CODING: tuple[Direction, Direction] = ("encode", "decode")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Price:
    """One message, or several together, of one rank.

    coding: seconds of the device in encoding and decoding, calls included. wire: seconds of the
    link between nodes, or of the link inside one. inside: seconds of native messages inside the
    node that belong to it; of a copy to or from the host, those of the bus and of the host's codec.
    nbytes, native_nbytes: that this rank sends to others, as it is sent and
    as native would have been. between_nbytes, between_native_nbytes: of these, what goes to ranks
    of other nodes.
    """

    coding: Figure = NOTHING
    wire: Figure = NOTHING
    inside: Figure = NOTHING
    nbytes: float = 0.0
    native_nbytes: float = 0.0
    between_nbytes: float = 0.0
    between_native_nbytes: float = 0.0

    def plus(self, other: Price) -> Price:
        """Both together."""
        return Price(
            self.coding.plus(other.coding), self.wire.plus(other.wire),
            self.inside.plus(other.inside), self.nbytes + other.nbytes,
            self.native_nbytes + other.native_nbytes,
            self.between_nbytes + other.between_nbytes,
            self.between_native_nbytes + other.between_native_nbytes,
        )  # fmt: skip

    def times(self, count: float) -> Price:
        """So many of it."""
        return Price(
            self.coding.times(count), self.wire.times(count), self.inside.times(count),
            count * self.nbytes, count * self.native_nbytes,
            count * self.between_nbytes, count * self.between_native_nbytes,
        )  # fmt: skip

    @property
    def seconds(self) -> Figure:
        """All of it, one after the other."""
        return self.coding.plus(self.wire).plus(self.inside)


FREE = Price()


class Coded(NamedTuple):
    """Calls of a codec for a message, on average; each has this share of the message's values."""

    direction: Direction
    calls: float
    share: float


@dataclass(frozen=True)
class Call:
    """A message as upstream hands it over.

    operation: upstream's. encoded_as: what hybridcomp makes of it (a bucket of which every rank
    keeps its part is only scattered). numel: values, counted as ``rows`` does. ranks, nodes: of its
    group. two_levels: whether ``hierarchy`` applies. coded: what a rank codes for it, where that is
    not what its collective codes.
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
        self, call: Call | Copying, choice: Choice, dtype: torch.dtype,
        dimension: Dimension | None = None,
    ) -> Price:  # fmt: skip
        """What one rank spends on ``call``. Raises HybridcompError where a figure is missing.

        ``dimension``: whose channel it goes through; None: only the collective counts.
        """
        key = call, choice, dtype, dimension
        if key not in self._known:
            if isinstance(call, Copying):
                self._known[key] = self._copied(call, choice, dtype)
            else:
                self._known[key] = self._price(call, choice, dtype, dimension or "")
        return self._known[key]

    def knows(self, choice: Choice, dtype: torch.dtype, copied: bool = False) -> bool:
        """Whether there are figures for the codec of ``choice``.

        ``copied``: for copies between device and host too, where any codec of the host has some.
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

    def _price(self, call: Call, choice: Choice, dtype: torch.dtype, dimension: str) -> Price:
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

    def _channel(self, call: Call, dimension: str) -> Price:
        """What a channel takes for a message that stays native."""
        busy = self._busy(call.ranks)
        more = self.cluster.channel_seconds(call.operation, call.ranks, call.nodes, dimension, busy)
        return Price(wire=more) if call.nodes > 1 else Price(inside=more)

    def _busy(self, ranks: int) -> bool:
        """Whether there are other groups beside one of ``ranks``."""
        return self.cluster.world_size > ranks

    def _native(self, call: Call, operation: Operation, dtype: torch.dtype, native: float) -> Price:
        nbytes = call.numel * dtype.itemsize
        seconds = self._seconds(operation, nbytes, call.ranks, call.nodes)
        where = {"wire": seconds} if call.nodes > 1 else {"inside": seconds}
        crossing = _crossing(call, dtype)
        return Price(
            nbytes=native, native_nbytes=native, between_nbytes=crossing,
            between_native_nbytes=crossing, **where,
        )  # fmt: skip

    def _seconds(self, operation: Operation, nbytes: float, ranks: int, nodes: int) -> Figure:
        """A native message beside those of all other groups, where there are others."""
        return self.cluster.seconds(operation, nbytes, ranks, nodes, busy=self._busy(ranks))

    def _encoded(
        self, call: Call, choice: Choice, dtype: torch.dtype, native: float, dimension: str = ""
    ) -> Price:
        """Steps: (1) its coding, (2) its payloads, (3) what a call costs, (4) its bytes."""
        codec, operation = choice.codec, call.encoded_as or call.operation
        assert codec is not None
        payload = call.numel * choice.bits(dtype) / 8
        shape = rings.encoded_shape(operation, call.ranks)
        coded = call.coded or tuple(Coded(way, 1.0, share) for way, share in shape.coded)
        # 1.
        timed, name = _timed(codec, dtype), NAMES[dtype]
        coding = Figure.total(
            self.cluster.coding(timed, name, one.share * call.numel, one.direction)
            .times(one.calls) for one in coded
        )  # fmt: skip
        # 2.
        wire = Figure.total(
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
        """A copy between device and host; what upstream fetches for it counts natively."""
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
        # master weights are encoded as they are, in fp32, where sizes are fixed
        own = "fp32" if codec.fixed_size and not (to_host or codec.lossless) else name
        sender, receiver = CODING
        mine, others = (sender, receiver) if to_host else (receiver, sender)
        device = cluster.coding(_timed(codec, dtype), name, call.numel, mine)
        host = cluster.coding(_timed(codec, dtype), own, call.numel, others, on_host=True)
        bus = cluster.copy(call.direction, payload)
        return Price(device, inside=bus.plus(host), nbytes=payload, native_nbytes=native)

    def _two_levels(self, call: Call, choice: Choice, dtype: torch.dtype, native: float) -> Price:
        """Native inside a node, encoded between nodes, where each rank has its stretch."""
        local = round(call.ranks / call.nodes)
        operation = call.encoded_as or call.operation
        stretch = Call(operation, call.numel / local, call.nodes, call.nodes)
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
            inner = Call(part, call.numel, local, 1)
            own = native_nbytes(part, call.numel, dtype, local)
            found = found.plus(Price(
                inside=self._native(inner, part, dtype, own).inside, nbytes=own
            ))  # fmt: skip
        return found


@functools.lru_cache(maxsize=4096)
def _timed(codec: Codec, dtype: torch.dtype) -> str:
    """The setting whose figures say what ``codec`` takes: a bound is kept by another codec."""
    return codec.hops(1, 2, result=dtype)[0].spec if codec.bounded else codec.spec


def _crossing(call: Call, dtype: torch.dtype) -> float:
    """Bytes that a rank sends to other nodes where ``call`` stays native."""
    nbytes = call.numel * dtype.itemsize
    return rings.crossing_nbytes(call.operation, nbytes, call.ranks, call.nodes)


@functools.lru_cache(maxsize=65536)
def native_nbytes(operation: Operation, numel: float, dtype: torch.dtype, ranks: int) -> float:
    """Bytes that one rank sends to others, as the ledger counts what native would have sent."""
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
