"""Simulate pipelines with blocking messages: DeepSpeed's ``PipelineEngine``, GPT-NeoX's too.

``TrainSchedule`` gives each stage a list of sends, receives and passes, which it executes in order,
and ``p2p.send`` and ``p2p.recv`` block. Two things follow that no other engine has:

* a stage sends an activation after it has received the gradient that its next pass needs, not right
  after the pass that made it: the two directions between a pair of stages are serialized, and no
  compute hides them;
* a message is transferred once sender and receiver have both called (gloo writes nothing before the
  receiver has asked, NCCL's kernels wait for each other). The receiver returns when all bytes have
  arrived, the sender when the last byte is in a buffer of its system, which is measured
  (``Timing.returned``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from hybridcomp.tools.plan.cost.schedule import Op, Task, order
from hybridcomp.tools.plan.cost.times import StageTimes
from hybridcomp.tools.plan.layout import Layout


class Move(NamedTuple):
    """One instruction of a stage: run a pass, or send or receive a message.

    pass_: the pass itself, or the pass whose result the message carries.
    """

    what: Literal["pass", "send", "receive"]
    pass_: Op


class StageMessage(NamedTuple):
    """The result of a pass, sent by the stage ``sender`` to a neighbour."""

    sender: int
    pass_: Op


@lru_cache(maxsize=1024)
def moves(stage: int, stages: int, micro_batches: int) -> tuple[Move, ...]:
    """Return the instructions of ``stage`` in a step, in the order of ``TrainSchedule.steps``."""
    return tuple(_moves(stage, stages, micro_batches))


def _moves(stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
    before: Op | None = None
    for own in order(stage, stages, 1, micro_batches):
        sends = [] if before is None or not _goes_on(before, stage, stages) else [
            Move("send", before)
        ]  # fmt: skip
        source = stage + 1 if own.backward else stage - 1
        receives = [Move("receive", own)] if 0 <= source < stages else []
        if own.backward and before is not None and _is_next_slot(before, own, stage, stages):
            yield from (*receives, *sends)
        else:
            yield from (*sends, *receives)
        yield Move("pass", own)
        before = own
    if before is not None and _goes_on(before, stage, stages):
        yield Move("send", before)


def _goes_on(own: Op, stage: int, stages: int) -> bool:
    return stage > 0 if own.backward else stage < stages - 1


def _is_next_slot(before: Op, own: Op, stage: int, stages: int) -> bool:
    """Return whether a backward pass has the slot right after a forward pass.

    Forward passes of a stage have the slots ``stage + 2 k``, backward passes ``2 stages - 1 - stage
    + 2 k``; a result is sent in the next slot, even if that slot has no pass.
    """
    return not before.backward and before.micro_batch == own.micro_batch + stages - 1 - stage


def message_of(move: Move, stage: int) -> StageMessage:
    """Return the message of a send or a receive of ``stage``."""
    if move.what == "send":
        return StageMessage(stage, move.pass_)
    return StageMessage(stage + 1 if move.pass_.backward else stage - 1, move.pass_)


def last_ends(
    layout: Layout,
    times: tuple[StageTimes, ...],
    micro_batches: int,
    tasks: list[Task] | None = None,
) -> list[float]:
    """Return when each stage has finished its passes and the reduction that follows.

    Appends passes, sends and reductions to ``tasks``.
    """
    stages = layout.stages
    rows = [moves(stage, stages, micro_batches) for stage in range(stages)]
    places, ready = [0] * stages, [0.0] * stages
    # when the sender and the receiver of each message have made their call
    here: dict[tuple[str, StageMessage], float] = {}
    links: dict[tuple[int, bool], float] = {}  # when each link becomes free
    left = sum(map(len, rows))
    while left:
        for stage in range(stages):
            row, own = rows[stage], times[stage]
            while places[stage] < len(row):
                move = row[places[stage]]
                took = own.took(move.pass_)
                if move.what == "pass":
                    begun = ready[stage]
                    ready[stage] += took.busy
                    if tasks is not None:
                        tasks.append(_task(move.pass_, stage, begun, ready[stage]))
                else:
                    message = message_of(move, stage)
                    other = "send" if move.what == "receive" else "receive"
                    here[move.what, message] = ready[stage]
                    if (other, message) not in here:
                        break
                    begun = max(ready[stage], here[other, message])
                    if move.what == "send":
                        ready[stage] = begun + took.returned
                    else:
                        link = message.sender, move.pass_.backward
                        sent = times[message.sender].took(move.pass_).sent
                        begun = max(begun, links.get(link, 0.0))
                        ready[stage] = links[link] = begun + sent
                        if tasks is not None:
                            tasks.append(_sent(message, begun, ready[stage]))
                places[stage] += 1
                left -= 1
    if tasks is not None:
        for stage, (own, end) in enumerate(zip(times, ready, strict=True)):
            tasks += _reductions(own, stage, end)
    return [end + _reduced(own) + own.reduce.coding for own, end in zip(times, ready, strict=True)]


def _task(pass_: Op, stage: int, start: float, end: float) -> Task:
    way = "backward" if pass_.backward else "forward"
    return Task(way, stage, pass_.chunk, pass_.micro_batch, f"stage {stage}", start, end)


def _sent(message: StageMessage, start: float, end: float) -> Task:
    way = "backward" if message.pass_.backward else "forward"
    place = message.sender, message.pass_.chunk, message.pass_.micro_batch
    return Task("send", *place, f"link {message.sender} {way}", start, end)


def _reductions(own: StageTimes, stage: int, start: float) -> list[Task]:
    """Return the link's task and the device's task of the reduction that begins at ``start``."""
    gone = start + _reduced(own)
    return [
        Task("reduce", stage, 0, 0, f"replicas {stage}", start, gone),
        Task("code", stage, 0, 0, f"stage {stage}", gone, gone + own.reduce.coding),
    ]


def _reduced(own: StageTimes) -> float:
    """Return the link seconds of a step's reductions that the last pass does not hide."""
    _, wire, hidden = own.behind(own.backward[0], False, True)
    return wire - hidden
