"""Price one message: bytes on the wire, seconds of the link, and seconds of its codec.

Native messages take the seconds measured on the cluster. Encoded messages are the collectives of
``hybridcomp.collectives``; their price adds coding, the messages that carry the payloads, and the
overhead of a call. Over several nodes with several ranks on each, ``dp`` and ``zero`` use two
levels (``collectives.hierarchical``): native inside a node, encoded between nodes. Over several
sites they use three levels; the level between the nodes of a site is native or has its own codec.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.words import DTYPE_NAMES
from hybridcomp.collectives.native_nbytes import (
    all_gather_nbytes,
    all_reduce_nbytes,
    all_to_all_nbytes,
    reduce_scatter_nbytes,
)
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.choices import INSIDE, Choice
from hybridcomp.tools.plan.cost.calls import FREE, Coded, EngineCall, Price
from hybridcomp.tools.plan.cost.copies import ALONE, BESIDE, Copying
from hybridcomp.tools.plan.machines import rings
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import NOTHING, Estimate
from hybridcomp.tools.plan.machines.rows import Direction, Operation

#: messages of fewer bytes stay native: the block's default of ``min_bytes``
MIN_BYTES = 65536
#: directions of a codec on the sender and on the receiver
CODING: tuple[Direction, Direction] = ("encode", "decode")


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

        ``dimension``: the one whose channel sends the message; None: price only the collective.
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

        ``copied``: the codec is for copies to and from the host; then its speed on the host is
        needed too, if the cluster has any codec speeds of hosts.
        """
        if choice.codec is None:
            return True
        spec, name = _timed(choice.codec, dtype), DTYPE_NAMES[dtype]
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
        if call.kept:
            coding = self._coding(call, choice, dtype, (Coded("decode", 1.0, 1.0),))
            crossing = _crossing(call, dtype)
            return Price(coding, native_nbytes=native, between_native_nbytes=crossing)
        if choice.native or call.numel * dtype.itemsize < MIN_BYTES:
            found = self._native(call, call.operation, dtype, native)
            return found.plus(self._channel(call, dimension))
        if call.inside:
            return self._in_levels(call, choice, dtype, native)
        return self._encoded(call, choice, dtype, native, dimension)

    def _channel(self, call: EngineCall, dimension: str) -> Price:
        """Price the overhead of a channel for a message that stays native."""
        busy = self._busy(call.ranks)
        more = self.cluster.channel_seconds(call.operation, call.ranks, call.nodes, dimension, busy)
        return Price(wire=more) if call.nodes > 1 else Price(inside=more)

    def _busy(self, ranks: int) -> bool:
        """Return whether the job has other groups besides one of ``ranks`` ranks."""
        return self.cluster.world_size > ranks

    def _native(
        self, call: EngineCall, operation: Operation, dtype: torch.dtype, native: float
    ) -> Price:
        nbytes = call.numel * dtype.itemsize
        seconds = self._seconds(operation, nbytes, call)
        where = {"wire": seconds} if call.nodes > 1 else {"inside": seconds}
        crossing = _crossing(call, dtype)
        return Price(
            nbytes=native, native_nbytes=native, between_nbytes=crossing,
            between_native_nbytes=_crossing(call.crosses_for or call, dtype), **where,
        )  # fmt: skip

    def _seconds(self, operation: Operation, nbytes: float, call: EngineCall) -> Estimate:
        """Return the seconds of a native message while all similar groups send at the same time."""
        busy = self._busy(call.ranks)
        sites = call.sites
        return self.cluster.seconds(operation, nbytes, call.ranks, call.nodes, busy, sites=sites)

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
        coding = self._coding(call, choice, dtype, coded)
        # 2.
        wire = Estimate.total(
            self._seconds(part, share * payload, call) for part, share in shape.sent
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
            between_native_nbytes=_crossing(call.crosses_for or call, dtype), **where,
        )  # fmt: skip

    def _coding(
        self, call: EngineCall, choice: Choice, dtype: torch.dtype, coded: Sequence[Coded]
    ) -> Estimate:
        """Return the seconds of these calls of the codec."""
        assert choice.codec is not None
        timed, name = _timed(choice.codec, dtype), DTYPE_NAMES[dtype]
        return Estimate.total(
            self.cluster.coding(timed, name, one.share * call.numel, one.direction)
            .times(one.calls) for one in coded
        )  # fmt: skip

    def _copied(self, call: Copying, choice: Choice, dtype: torch.dtype) -> Price:
        """Price a copy between device and host; native bytes include sums that upstream fetches."""
        cluster, codec = self.cluster, choice.codec
        native = call.nbytes + call.back_nbytes
        if call.direction == "to_drive":
            return self._filed(call, choice, dtype)
        to_host = call.direction == "to_host"
        if codec is None or call.numel * dtype.itemsize < MIN_BYTES:
            there, back = call.busiest or (call.nbytes, call.back_nbytes)
            bus = cluster.copy(call.direction, there)
            if back:
                bus = bus.plus(cluster.copy("to_device", back))
            return Price(inside=bus, nbytes=native, native_nbytes=native)
        payload, name = call.numel * choice.bits(dtype) / 8, DTYPE_NAMES[dtype]
        # master weights are encoded from fp32, without a cast, where payload sizes are fixed
        own = "fp32" if codec.fixed_size and not (to_host or codec.lossless) else name
        sender, receiver = CODING
        mine, others = (sender, receiver) if to_host else (receiver, sender)
        device = cluster.coding(_timed(codec, dtype), name, call.numel, mine)
        host = cluster.coding(_timed(codec, dtype), own, call.numel, others, on_host=True)
        bus = cluster.copy(call.direction, payload)
        return Price(device, inside=bus.plus(host), nbytes=payload, native_nbytes=native)

    def _filed(self, call: Copying, choice: Choice, dtype: torch.dtype) -> Price:
        """Price optimizer states that go to the drive and back; no compute hides their coding."""
        cluster, native = self.cluster, call.nbytes + call.back_nbytes
        share = 1.0
        if choice.codec is not None:
            share = BESIDE if dtype == torch.bfloat16 else ALONE
        moved = cluster.copy("to_drive", share * call.nbytes).plus(
            cluster.copy("from_drive", share * call.back_nbytes))  # fmt: skip
        if choice.codec is not None:
            spec = choice.codec.spec
            for way in CODING:
                moved = moved.plus(cluster.coding(spec, "fp32", call.numel, way, on_host=True))
        return Price(inside=moved, nbytes=share * native, native_nbytes=native)

    def _in_levels(
        self, call: EngineCall, choice: Choice, dtype: torch.dtype, native: float
    ) -> Price:
        """Price a message in levels: native inside nodes (or sites), encoded between them.

        The second of three levels exchanges sums in fp32, or encoded (``Choice.inside``). The
        payloads of a gather cross it encoded.
        """
        operation, width = call.encoded_as or call.operation, math.prod(call.inside)
        units = call.ranks // width
        stretch = EngineCall(operation, call.numel / width, units, units, sites=call.sites)
        between = self._encoded(stretch, choice, dtype, 0.0)
        found = Price(
            between.coding, between.wire, NOTHING, between.nbytes, native, between.between_nbytes,
            _crossing(call, dtype),
        )  # fmt: skip
        numel, local = call.numel, call.ranks // call.nodes
        for level, ranks in enumerate(call.inside):
            nodes = ranks if level or local == 1 else 1
            if level and operation == "all_gather":
                found = found.plus(self._relayed(numel, ranks, choice, dtype))
                break
            for part in rings.level_parts(operation):
                if level and part == "all_to_all" and choice.inside:
                    found = found.plus(self._encoded_inside(numel, ranks))
                    continue
                own = torch.float32 if level and part == "all_to_all" else dtype
                inner = EngineCall(part, numel, ranks, nodes)
                cost = self._native(inner, part, own, native_nbytes(part, numel, own, ranks))
                found = found.plus(replace(cost, native_nbytes=0.0, between_native_nbytes=0.0))
            numel /= ranks
        return found

    def _encoded_inside(self, numel: float, ranks: int) -> Price:
        """Price the encoded exchange of fp32 sums of ``numel`` values among the nodes of a site."""
        call = EngineCall("reduce_scatter", numel, ranks, ranks)
        cost = self._encoded(call, Choice.of(INSIDE), torch.float32, 0.0)
        return replace(cost, native_nbytes=0.0, between_native_nbytes=0.0)

    def _relayed(self, numel: float, ranks: int, choice: Choice, dtype: torch.dtype) -> Price:
        """Price a gather's second level: the nodes of a site all-gather payloads and decode them.

        Of ``numel`` values, a node does not receive those that it already has from other sites.
        """
        assert choice.codec is not None
        share = choice.bits(dtype) / (8 * dtype.itemsize)
        call = EngineCall("all_gather", numel * share, ranks, ranks)
        nbytes = native_nbytes("all_gather", numel, dtype, ranks) * share
        cost = self._native(call, "all_gather", dtype, nbytes)
        values = numel * (ranks - 1) / ranks
        timed, name = _timed(choice.codec, dtype), DTYPE_NAMES[dtype]
        coding = self.cluster.coding(timed, name, values, "decode")
        found = replace(cost, native_nbytes=0.0, between_native_nbytes=0.0)
        return found.plus(Price(coding=coding))


@functools.lru_cache(maxsize=4096)
def _timed(codec: Codec, dtype: torch.dtype) -> str:
    """Return the timed setting whose speed ``codec`` has: an error bound runs another codec."""
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
