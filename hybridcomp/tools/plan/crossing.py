"""Count the bytes of a step inside and between nodes, natively and with a block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridcomp.channels.accounting.rank_messages import RankMessages, Way
from hybridcomp.codecs.base import Codec
from hybridcomp.tools.plan.cost.prices import native_nbytes
from hybridcomp.tools.plan.machines.rings import crossing_nbytes, encoded_shape, level_parts
from hybridcomp.tools.plan.machines.rows import Operation
from hybridcomp.tools.plan.pays import bits

#: native collective of each ``RankMessages.how``, and the collective that encodes it
OPERATIONS: Mapping[Way, tuple[Operation, Operation]] = {
    "sum": ("all_reduce", "all_reduce"),
    "own": ("all_reduce", "reduce_scatter"),
    "scatter": ("reduce_scatter", "reduce_scatter"),
    "gather": ("all_gather", "all_gather"),
}


@dataclass(frozen=True)
class LinkNbytes:
    """Bytes per step that the ranks of one node send to each other, and to other nodes."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: LinkNbytes) -> LinkNbytes:
        return LinkNbytes(self.inside + other.inside, self.between + other.between)

    def times(self, count: float) -> LinkNbytes:
        """Return the bytes of ``count`` such messages or ranks."""
        return LinkNbytes(count * self.inside, count * self.between)


def of_messages(
    found: Iterable[RankMessages], codec: Codec | None, per_node: int, min_bytes: int = 0
) -> tuple[LinkNbytes, LinkNbytes]:
    """Return the bytes that a node sends for messages of its replicas, natively and encoded.

    Ranks of a group are consecutive, ``per_node`` on each node; messages of fewer bytes than
    ``min_bytes`` stay native.
    """
    whole = LinkNbytes(), LinkNbytes()
    for message in found:
        local = min(per_node, message.ranks)
        for numel in message.numels:
            native = _native(message, numel, message.ranks // local)
            sent = native
            if codec is not None and numel * message.dtype.itemsize >= min_bytes:
                sent = _encoded(message, numel, codec, local)
            whole = whole[0] + native.times(local), whole[1] + sent.times(local)
    return whole


def _native(message: RankMessages, numel: float, nodes: int) -> LinkNbytes:
    """Return the bytes that a rank sends natively in a ring of all ranks, as a mean over ranks."""
    operation = OPERATIONS[message.how][0]
    sent = native_nbytes(operation, numel, message.dtype, message.ranks)
    between = crossing_nbytes(operation, numel * message.dtype.itemsize, message.ranks, nodes)
    return LinkNbytes(sent - between, between)


def _encoded(message: RankMessages, numel: float, codec: Codec, local: int) -> LinkNbytes:
    """Return the bytes that a rank sends encoded; in two levels, natively inside a node."""
    operation = OPERATIONS[message.how][1]
    own, ranks, nodes = numel / message.width, message.encoders, message.ranks // local
    payload = own * bits(codec, message.dtype) / 8
    parts = [(part, share * payload) for part, share in encoded_shape(operation, ranks).sent]
    spread = nodes if message.width == 1 else ranks
    sent = sum(_sent(part, nbytes, ranks) for part, nbytes in parts)
    between = sum(crossing_nbytes(part, nbytes, ranks, spread) for part, nbytes in parts)
    inside = sum(
        native_nbytes(part, numel, message.dtype, message.width)
        for part in level_parts(operation) if message.width > 1
    )  # fmt: skip
    return LinkNbytes(inside + sent - between, between)


def _sent(operation: Operation, nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends to others in a gather or exchange of ``nbytes``."""
    return nbytes * (ranks - 1) / ranks * (2 if operation == "all_reduce" else 1)
