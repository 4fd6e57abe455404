"""Time encoded collectives of hybridcomp from the call to the result, the host's work included.

In addition to coding and wire, a message costs headers, buffers, sizes, and the Python of each
call.
Messages of two sizes give that overhead (``plan/machines/overheads``).
"""

from __future__ import annotations

from itertools import product as every

import torch

from hybridcomp import collectives
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.words import DTYPES
from hybridcomp.collectives import Group, Meter, Reduction, Transfer
from hybridcomp.tools.measure.clock import CallClock, Run, least_calls
from hybridcomp.tools.measure.coders import product_beside, random_values
from hybridcomp.tools.measure.links import Key, timed
from hybridcomp.tools.measure.team import GroupShape, MeasuredPart, Team
from hybridcomp.tools.plan.machines.rows import Encoded, LeftOut, Operation

#: a codec of fixed size, and a codec of variable size, which exchanges sizes first
CODECS: tuple[tuple[str, dict[str, int]], ...] = (("blockint", {"bits": 8}), ("expcode", {}))
#: values of the two messages
NUMELS = (1 << 15, 1 << 20)
#: the longer message is left out if its fewest calls may take this many times the allowance; the
#: seconds of the shorter message, mostly constant, overestimate it
PATIENCE = 6.0
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def message_rows(
    team: Team, clock: CallClock, part: MeasuredPart, shapes: list[GroupShape], dtype: str
) -> tuple[list[Encoded], list[LeftOut]]:
    """Time all messages; return equal rows on all ranks, and messages not timed; a collective."""
    codecs = [make_codec(name, **settings) for name, settings in CODECS]
    cases = [
        (numel, codec, Key(operation, shape, "alone"))
        for numel, codec, shape in every(NUMELS, codecs, shapes)
        for operation in (*OPERATIONS, *(("send",) if shape.ranks == 2 else ()))
    ]  # fmt: skip
    product, rows = product_beside(clock, team.device), []
    left_out: list[LeftOut] = []
    # seconds per value, and values of the message that was timed
    rates: dict[tuple[str, Operation, int, int], tuple[float, int]] = {}
    for (numel, codec, key), allowance in zip(cases, part.allowances(len(cases)), strict=True):
        kind = (codec.spec, key.operation, key.shape.ranks, key.shape.nodes)
        rate, known = rates.get(kind, (0.0, 0))
        if rate * numel * least_calls(rate * numel) > PATIENCE * allowance:
            size = key.shape.ranks, key.shape.nodes
            left_out.append(LeftOut(key.operation, dtype, *size, numel, known, setting=codec.spec))
            continue
        run = None
        if key.active:
            run = runner(key.operation, codec, key.shape, numel, DTYPES[dtype], team)
        found = timed(team, clock, run, key, allowance, product)
        rates[kind] = found.seconds.value / numel, numel
        half = 0.5 if key.operation == "send" else 1.0  # the message goes there and back
        shape = key.shape
        rows.append(
            Encoded(
                key.operation, codec.spec, dtype, shape.ranks, shape.nodes, numel,
                payload_nbytes(codec, numel, DTYPES[dtype]), found.seconds.times(half),
            )
        )  # fmt: skip
    return rows, left_out


def payload_nbytes(codec: Codec, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of the payload of these messages' values, of fixed or variable size."""
    values = random_values(numel, dtype, torch.device("cpu"))
    room = torch.zeros(codec.wire_nbytes(numel, dtype), dtype=torch.uint8)
    return codec.encode(values, room)


def runner(
    operation: Operation,
    codec: Codec,
    shape: GroupShape,
    numel: int,
    dtype: torch.dtype,
    team: Team,
) -> Run:
    """Build one call of an encoded collective on this rank's group; a send goes there and back."""
    if numel % shape.ranks:
        numel += shape.ranks - numel % shape.ranks
    group = Group.of(shape.group)
    values = random_values(numel, dtype, team.device)
    out = torch.zeros_like(values)
    shards = list(torch.split(values, numel // shape.ranks))
    mine = shards[group.rank]

    def all_reduce() -> None:
        out.copy_(values)  # repeated sums would overflow
        collectives.all_reduce(out, Reduction(codec, group, Meter()))

    def send() -> None:
        one, two = shape.own
        other = two if team.rank == one else one
        via = Transfer(codec, group, Meter())
        for sends in (team.rank == one, team.rank == two):
            if sends:
                collectives.send(values, other, via)
            else:
                collectives.recv(out, other, via)

    runs: dict[Operation, Run] = {
        "all_reduce": all_reduce,
        "send": send,
        "reduce_scatter": lambda: collectives.reduce_scatter(
            shards, Reduction(codec, group, Meter())
        ).wait(),
        "all_gather": lambda: collectives.all_gather(mine, out, Transfer(codec, group, Meter())),
        "all_to_all": lambda: collectives.all_to_all(out, values, Transfer(codec, group, Meter())),
    }
    return runs[operation]
