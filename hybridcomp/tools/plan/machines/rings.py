"""Closed forms of a collective's seconds, from the seconds of a send.

Rings as NCCL's: an all-reduce of n ranks takes 2 (n - 1) steps, a gather or a reduce-scatter n - 1,
each with 1/n of the bytes (gloo's reduce-scatter takes 2 (n - 1), too); in an all-to-all a rank
sends 1/n to every other one. A ring over several nodes is as slow as the links between them.
Thakur, Rabenseifner and Gropp 2005, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.rows import Direction, Operation

#: seconds of a send of so many bytes
Send = Callable[[float], Estimate]


def level_parts(operation: Operation) -> tuple[Operation, ...]:
    """Return the native messages of an encoded collective inside of a node, or of a site."""
    if operation == "all_gather":
        return ("all_gather",)
    return ("all_to_all",) if operation == "reduce_scatter" else ("all_to_all", "all_gather")


def ring(
    operation: Operation, nbytes: float, ranks: int, nodes: int, inside: Send | None,
    between: Send | None, sharing: float = 1.0,
) -> Estimate:  # fmt: skip
    """Return the seconds of one collective of ``ranks`` ranks on ``nodes`` nodes.

    Args:
        inside: a send inside a node; None only where ``nodes == ranks``.
        between: a send between nodes; None only where ``nodes == 1``.
        sharing: groups whose messages share the link of a node at the same time.
    """
    link = inside if nodes == 1 else between
    assert link is not None
    share = sharing if nodes > 1 else 1.0
    if operation == "send":
        return link(share * nbytes)
    part = nbytes / ranks
    if operation != "all_to_all":
        steps = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        return link(share * part).times(steps)
    if nodes == 1:
        return link(part).times(ranks - 1)
    local = ranks / nodes
    # all bytes that a node's ranks send to other nodes leave through the node's one link
    crossing = link(share * local * part).times(ranks - local)
    within = inside(part).times(local - 1) if inside is not None and local > 1 else None
    return crossing if within is None or within.value < crossing.value else within


def crossing_nbytes(operation: Operation, nbytes: float, ranks: int, nodes: int) -> float:
    """Return the bytes that a rank sends to other nodes, as the mean of all ranks.

    A ring leaves each node over one link; an all-to-all sends every rank of another node its part.
    """
    if nodes == 1:
        return 0.0
    if operation == "send":
        return nbytes
    part, local = nbytes / ranks, ranks / nodes
    if operation == "all_to_all":
        return part * (ranks - local)
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) * part / local


@dataclass(frozen=True)
class RingShape:
    """Codec calls of an encoded collective (shares of values) and messages (shares of payload)."""

    coded: tuple[tuple[Direction, float], ...]
    sent: tuple[tuple[Operation, float], ...]


def encoded_shape(operation: Operation, ranks: int) -> RingShape:
    """Return the codec calls of one rank, and the messages that carry the payloads.

    Shares are fractions of the message's values, and of the payload of all these values. In an
    all-reduce two ranks swap whole payloads, which is an all-to-all of twice the bytes; more ranks
    run an all-to-all of chunks and an all-gather of the chunks' sums (``collectives``).
    """
    others = (ranks - 1) / ranks
    if operation == "send":
        return RingShape((("encode", 1.0), ("decode", 1.0)), (("send", 1.0),))
    if operation == "all_gather":
        return RingShape((("encode", 1 / ranks), ("decode", 1.0)), (("all_gather", 1.0),))
    if operation == "all_to_all":
        return RingShape((("encode", others), ("decode", others)), (("all_to_all", 1.0),))
    if operation == "reduce_scatter":
        return RingShape((("encode", others), ("decode_add", others)), (("all_to_all", 1.0),))
    if ranks == 2:
        return RingShape((("encode", 1.0), ("decode_add", 2.0)), (("all_to_all", 2.0),))
    return RingShape(
        (("encode", others + 1 / ranks), ("decode_add", others), ("decode", 1.0)),
        (("all_to_all", 1.0), ("all_gather", 1.0)),
    )
