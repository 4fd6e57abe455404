"""Build trials of messages: functions that send them natively or encoded, to completion.

Trials do not belong to the model's traffic: they touch neither its ledger nor its residuals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybridcomp import collectives
from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.codecs.exact_steps import typical_steps
from hybridcomp.collectives import Group, Meter, Reduction, Transfer
from hybridcomp.collectives.wire.transport import all_gather_single
from hybridcomp.job import small_messages

#: runs collectives until they are complete
Run = Callable[[], None]

#: most values of a trial message; no message of a channel exceeds it
MESSAGE_NUMEL = 1 << 27


@dataclass(frozen=True)
class PlannedMessage:
    """A message of a layer or between stages; gathers and scatters are timed as reductions."""

    codec: Codec
    group: dist.ProcessGroup | None
    between: tuple[int, int] | None  # global ranks of sender and receiver, for a send
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class TrialGroup:
    """Group of a trial's messages, with their dtype and device."""

    group: Group
    dtype: torch.dtype
    device: torch.device

    def values(self, numel: int) -> torch.Tensor:
        """Return noise that differs between ranks."""
        return _values(numel, self.dtype, self.device)


@dataclass(frozen=True)
class StepTraffic:
    """Messages of a dimension in a step, equal on all ranks of a group.

    Attributes:
        numels: values of each message: per rank for a sum, of all ranks together for a gather.
        how: "sum": every rank gets the sums; "own": a rank gets its share of all sums of the step
            (ZeRO 1 and 2, upstream an all-reduce); "scatter": its share of each sum (ZeRO 3); or
            "gather".
        together: whether all messages are posted before the first is waited for.
        copied: whether gathers of deltas keep a copy of this rank's share.
    """

    numels: tuple[int, ...]
    how: Literal["sum", "own", "scatter", "gather"]
    together: bool = False
    copied: bool = True

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def cut(self, most: int) -> StepTraffic:
        """Keep the first messages up to ``most`` values in all, but at least one."""
        kept: list[int] = []
        total = 0
        for numel in (min(numel, MESSAGE_NUMEL, most) for numel in self.numels):
            total += numel
            if kept and total > most:
                break
            kept.append(numel)
        return replace(self, numels=tuple(kept))


class _Step:
    """Values of a trial: constant, or for step codecs two versions in turn, one step apart."""

    def __init__(self, values: torch.Tensor, codec: Codec) -> None:
        self._codec, self._values = codec, values
        moves = codec.references and codec.takes(values.dtype)
        self._other = typical_steps(values) if moves else None
        self._held = values

    def next(self) -> tuple[torch.Tensor, Codec]:
        """Return the values to send next, and their codec."""
        if self._other is None:
            return self._values, self._codec
        held, codec = self._held, self._codec.against(self._held)
        self._held = self._other if held is self._values else self._values
        return self._held, codec

    def restart(self) -> None:
        """Record that all ranks received the first version."""
        self._held = self._values


def gathers(codec: Codec, where: TrialGroup) -> Callable[[StepTraffic], tuple[Run, Run]]:
    """Build trials of all-gathers of parameters; ``numels`` are the gathered sizes."""
    group = where.group

    def trial(sent: StepTraffic) -> tuple[Run, Run]:
        world_size = group.size
        lengths = [-(-numel // world_size) for numel in sent.numels]
        values = where.values(max(lengths))
        apart = sent.together or codec.references  # each message keeps its decoded values
        room = values.new_empty(world_size * (sum(lengths) if apart else max(lengths)))
        starts = accumulate(lengths if apart else [0] * len(lengths), initial=0)
        messages = [
            (values[:length], room[world_size * start : world_size * (start + length)])
            for start, length in zip(starts, lengths, strict=False)
        ]
        chosen = [
            codec.for_message(shard.numel(), where.dtype, world_size) for shard, _ in messages
        ]
        steps = [_Step(shard, taken) for (shard, _), taken in zip(messages, chosen, strict=True)]

        def coded() -> None:
            handles: list[Any] = []
            for (_, out), step in zip(messages, steps, strict=True):
                shard, sent_by = step.next()
                ahead = sent.together and group.levels is None and sent_by.fixed_size
                via = Transfer(sent_by, group, Meter())
                handles.append(collectives.all_gather(shard, out, via, async_op=ahead))
            for handle in handles:
                handle.wait()

        def native() -> None:
            works: list[Any] = []
            pg = group.process_group
            for (shard, out), step in zip(messages, steps, strict=True):
                step.restart()
                works.append(all_gather_single(out, shard, group=pg, async_op=sent.together))
            for work in works if sent.together else ():
                work.wait()

        if codec.references:
            native()  # from here on the receivers hold an earlier version
        return native, coded

    return trial


def agree_on(
    sent: StepTraffic | None, group: dist.ProcessGroup | None, device: torch.device
) -> bool:
    """Return whether every rank knows its messages, and all ranks of each ``group`` know the same.

    A collective over the job; ranks with different messages would wait for each other forever.
    """
    facts = [0, 0, 0] if sent is None else [len(sent.numels), sent.numel, hash(sent.numels)]
    least = torch.tensor([*facts, *(-number for number in facts)], device=device)
    small_messages.least(least, group)
    low, high = least.tolist()[:3], [-number for number in least.tolist()[3:]]
    agreed = torch.tensor(int(low == high and bool(low[0])), device=device)
    return bool(small_messages.least(agreed))


def main_dtype(
    numels: Iterable[tuple[torch.dtype, int]], otherwise: torch.dtype = torch.float32
) -> torch.dtype:
    """Return the dtype of most values, of those that codecs take; ``otherwise`` if there is none.

    ``numels``: dtype and elements of each parameter. A model may begin with weights in integers,
    or with a few in another dtype than nearly all others.
    """
    found: Counter[torch.dtype] = Counter()
    for dtype, numel in numels:
        if dtype in VALUE_DTYPES:
            found[dtype] += numel
    return max(found, key=lambda dtype: (found[dtype], str(dtype)), default=otherwise)


def _values(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(
        device, dtype
    )


def messages(planned: Sequence[PlannedMessage], device: torch.device) -> tuple[Run, Run]:
    """Build a trial of several messages of layers or stages, one after the other.

    ``planned``: the messages of this rank, in one order on all ranks, so that no ranks deadlock; if
    it is empty the functions do nothing.
    """
    values = [_values(plan.numel, plan.dtype, device) for plan in planned]
    groups = [Group.of(plan.group) for plan in planned]

    def native() -> None:
        for message, tensor in zip(planned, values, strict=True):
            if message.between is None:
                dist.all_reduce(tensor, group=message.group)
                tensor.mul_(0.5)  # halved so that repeated sums do not overflow
            elif message.between[0] == dist.get_rank():
                dist.send(tensor, message.between[1], group=message.group)
            else:
                dist.recv(tensor, message.between[0], group=message.group)

    def coded() -> None:
        for message, group, tensor in zip(planned, groups, values, strict=True):
            how = message.codec, group, Meter()
            if message.between is None:
                collectives.all_reduce(tensor, Reduction(*how))
                tensor.mul_(0.5)
            elif message.between[0] == dist.get_rank():
                collectives.send(tensor, message.between[1], Transfer(*how))
            else:
                collectives.recv(tensor, message.between[0], Transfer(*how))

    return native, coded
