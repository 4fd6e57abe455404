"""Time messages of tp, pp, ep and cp through the channels of their dimensions.

Small trainings measure data-parallel messages in an engine (``trainings``). Messages of tp, pp, ep
and cp need layers and stages that a measurement does not build; this module sends such messages
through the wrappers and channels of a training, with its choice of codec, records, headers and
waits. Each message is timed in turns by torch.distributed without a channel, through a channel
without a codec, and through channels with codecs; in one group, and in all groups of the shape at
once, as in a training.

tp  the all-reduce after a layer, and with sequence parallelism a gather and a reduce-scatter
pp  an activation to the next stage and the gradient back, blocking, as in DeepSpeed's pipeline
ep  the all-to-all of experts; sequence parallelism of Ulysses (cp) uses the same code
cp  a hop of ring attention: both ranks of a pair send and receive
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product as every
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels, Message, Receive, Send
from hybridcomp.channels.messages.rings import record_ring, ring_of
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.words import DTYPES
from hybridcomp.collectives.wire.transport import all_gather_single, reduce_scatter_single
from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import Direction
from hybridcomp.patches.common.collective_wrappers import (
    make_all_gather_into_tensor,
    make_all_reduce,
    make_all_to_all_single,
    make_reduce_scatter_tensor,
)
from hybridcomp.patches.common.routes import Layers
from hybridcomp.tools.measure.clock import CallClock, Run, least_calls
from hybridcomp.tools.measure.coders import random_values
from hybridcomp.tools.measure.links import Key, in_turns
from hybridcomp.tools.measure.messages import CODECS, payload_nbytes
from hybridcomp.tools.measure.team import GroupShape, MeasuredPart, Team
from hybridcomp.tools.plan.machines.rows import NATIVE, Carried, LeftOut, Operation

Name = Literal["tp", "pp", "ep", "cp"]
#: messages of each dimension; those of pp and cp only in groups of two ranks
MESSAGES: tuple[tuple[Name, Operation], ...] = (
    ("tp", "all_reduce"), ("tp", "all_gather"), ("tp", "reduce_scatter"), ("pp", "send"),
    ("ep", "all_to_all"), ("cp", "send"),
)  # fmt: skip
#: values of the two messages, like the activations of a small and of a large model
NUMELS = {"cpu": (1 << 15, 1 << 20), "cuda": (1 << 15, 1 << 22)}
#: leave out the longer message if all its turns may take this many times the allowance
PATIENCE = 6.0
#: name of the run by torch.distributed, without a channel
DIRECT = ""


@dataclass(frozen=True)
class _TimedMessage:
    """A message of ``numel`` values, in one group or in all groups of a shape at once."""

    name: Name
    numel: int
    key: Key

    @property
    def kind(self) -> tuple[object, ...]:
        shape = self.key.shape
        return self.name, self.key.operation, shape.ranks, shape.nodes, self.key.beside


def channel_rows(
    team: Team, clock: CallClock, part: MeasuredPart, shapes: list[GroupShape], dtype: str
) -> tuple[list[Carried], list[LeftOut]]:
    """Time all messages; return equal rows on all ranks, and messages not timed; a collective."""
    codecs = {make_codec(name, **more).spec: (name, more) for name, more in CODECS}
    blocks: dict[str, tuple[str, Mapping[str, Any]]] = {NATIVE: (NATIVE, {}), **codecs}
    channels = {setting: channels_of(*block) for setting, block in blocks.items()}
    cases, rows = list(_cases(shapes, NUMELS[team.device.type])), []
    left_out: list[LeftOut] = []
    timed: dict[tuple[object, ...], int] = {}  # values of the longest message timed so far
    rates: dict[tuple[object, ...], float] = {}  # seconds per value, over all turns
    for case, allowance in zip(cases, part.allowances(len(cases)), strict=True):
        expected = rates.get(case.kind, 0.0) * case.numel  # seconds of all turns
        calls = least_calls(expected / len(blocks))
        if expected * calls > PATIENCE * allowance:
            left_out.append(_left_out(case, dtype, timed[case.kind]))
            continue
        runs = {}
        if case.key.active:
            values = random_values(case.numel, DTYPES[dtype], team.device)
            runs = {name: runner(case.name, case.key, values, found, team)
                    for name, found in {DIRECT: None, **channels}.items()}  # fmt: skip
        taken = in_turns(team, clock, [DIRECT, *channels], runs, allowance)
        rates[case.kind] = sum(one.value for one in taken.values()) / case.numel
        timed[case.kind] = case.numel
        half = 0.5 if case.name == "pp" else 1.0  # the message goes there and back
        width = DTYPES[dtype].itemsize
        for setting in channels:
            nbytes = width * case.numel
            if setting != NATIVE:
                name, more = codecs[setting]
                nbytes = payload_nbytes(make_codec(name, **more), case.numel, DTYPES[dtype])
            shape = case.key.shape
            rows.append(Carried(
                case.key.operation, setting, dtype, shape.ranks, shape.nodes, case.numel, nbytes,
                taken[setting].times(half), dimension=case.name, direct=taken[DIRECT].times(half),
                beside="alone" if case.key.beside == "alone" else "groups",
            ))  # fmt: skip
    for channel in channels.values():
        channel.close_step(False, team.device)  # check headers that are still pending
    return rows, left_out


def _cases(shapes: list[GroupShape], numels: tuple[int, int]) -> Iterator[_TimedMessage]:
    """Yield shorter messages first, since their seconds predict those of longer messages."""
    for numel, (name, operation), shape in every(numels, MESSAGES, shapes):
        if operation == "send" and shape.ranks > 2:
            continue
        whole = -(-numel // shape.ranks) * shape.ranks  # every rank has an equal part
        yield _TimedMessage(name, whole, Key(operation, shape, "alone"))
        if len(shape.groups) > 1:
            yield _TimedMessage(name, whole, Key(operation, shape, "groups"))


def _left_out(case: _TimedMessage, dtype: str, timed: int) -> LeftOut:
    shape = case.key.shape
    return LeftOut(
        case.key.operation, dtype, shape.ranks, shape.nodes, case.numel, timed, case.name,
        beside="alone" if case.key.beside == "alone" else "groups",
    )  # fmt: skip


def channels_of(codec: str, settings: Mapping[str, Any]) -> Channels:
    """Build the channels of a block that gives all of these dimensions one codec."""
    block: dict[str, Any] = {"min_bytes": 0, "ledger": {"sample_every": 0}}
    for name, _ in MESSAGES:
        block[name] = {"codec": codec, **settings}
    return Channels(CompressionConfig.parse(block))


def runner(name: Name, key: Key, values: Tensor, channels: Channels | None, team: Team) -> Run:
    """Build a call that sends a message through ``channels``; None: by torch.distributed."""
    if name == "pp":
        return _there_and_back(key.shape, values, channels, team)
    if name == "cp":
        return _hop(key.shape, values, channels, team)
    return _collective(name, key, values, channels)


def _collective(name: Name, key: Key, values: Tensor, channels: Channels | None) -> Run:
    """Build the call of a layer's collective: upstream's function, or the seam's wrapper of it."""
    group, out = key.shape.group, torch.zeros_like(values)
    part = values[: values.numel() // key.shape.ranks]
    own = torch.zeros_like(part)
    layers = Layers(lambda group: name, lambda: "forward", lambda: channels)

    def wrapped(make: Callable[[Layers], Any], original: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = original if channels is None else make(layers)(original)
        return found

    if key.operation == "all_reduce":
        reduce = wrapped(make_all_reduce, dist.all_reduce)

        def all_reduce() -> None:
            out.copy_(values)  # repeated sums would overflow
            reduce(out, group=group)

        return all_reduce
    if key.operation == "all_gather":
        gather = wrapped(make_all_gather_into_tensor, all_gather_single)
        return lambda: gather(out, part, group=group)
    if key.operation == "reduce_scatter":
        scatter = wrapped(make_reduce_scatter_tensor, reduce_scatter_single)
        return lambda: scatter(own, values, group=group)
    exchange = wrapped(make_all_to_all_single, dist.all_to_all_single)
    return lambda: exchange(out, values, group=group)


def _there_and_back(
    shape: GroupShape, values: Tensor, channels: Channels | None, team: Team
) -> Run:
    """Build a call that sends an activation to the other rank of a pair, and a gradient back."""
    one, two = shape.own
    first, other = team.rank == one, two if team.rank == one else one
    out, group = torch.zeros_like(values), shape.group
    channel = None if channels is None else channels["pp"]

    def move(direction: Direction, sends: bool) -> None:
        native: Callable[[], Any] = partial(dist.recv, out, other, group=group)
        if sends:
            native = partial(dist.send, values, other, group=group)
        if channel is None:
            native()
            return
        ends = (team.rank, other) if sends else (other, team.rank)
        fields: Any = {"numel": values.numel(), "dtype": values.dtype, "group": group,
                       "direction": direction, "between": ends}  # fmt: skip
        message: Message[None] = (
            Send(values=values, **fields) if sends else Receive(out=out, **fields)
        )
        channel.run(message, native=native, encoded=lambda _: None)

    def run() -> None:
        move("forward", first)
        move("backward", not first)

    return run


def _hop(shape: GroupShape, values: Tensor, channels: Channels | None, team: Team) -> Run:
    """Build a hop of a ring of two: both ranks send keys and values and receive the other's."""
    out, group = torch.zeros_like(values), shape.group
    one, two = shape.own
    other = two if team.rank == one else one

    def direct() -> None:
        work = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, values, other, group),
            dist.P2POp(dist.irecv, out, other, group),
        ])  # fmt: skip
        for each in work:
            each.wait()

    if channels is None:
        return direct
    channel = channels["cp"]

    def hop() -> None:
        codec = channel.codec(values.numel(), values.dtype, group, "forward")
        if codec is not None:
            (codec,) = codec.split_error_budget(1, 1, result=values.dtype)
        ring = ring_of(channel, codec, group, values.device)
        parcel = ring.pack([values])
        came = ring.shift(parcel, 1, parcel.contents).wait()
        assert came is not None
        ring.open(came, 0, out)
        came.release()
        record_ring(channel, ring, values.nbytes, "forward")

    return hop
