"""Compute the seconds of a step without its timeline: the tasks of ``step`` as a recurrence.

Every stage does its passes in a fixed order, so that their ends follow from each other; a test
compares the result with the event simulation. A search calls this some thousand times.
"""

from __future__ import annotations

from hybridcomp.plan.cost import blocking_pipeline
from hybridcomp.plan.cost.schedule import Op, order
from hybridcomp.plan.cost.times import StageTimes, meet
from hybridcomp.plan.layout import Layout


def step_seconds(layout: Layout, times: tuple[StageTimes, ...], micro_batches: int) -> float:
    """Return the seconds of a step of ``micro_batches``."""
    if meet(times):
        return blocking_pipeline.step_seconds(layout, times, micro_batches)
    stages = layout.stages
    slices = layout.slice_count
    orders = [
        order(stage, stages, layout.virtual, micro_batches, slices) for stage in range(stages)
    ]
    places, ready, links = [0] * stages, [0.0] * stages, [0.0] * stages
    sent: list[dict[Op, float]] = [{} for _ in range(stages)]
    left = sum(map(len, orders))
    while left:
        for stage in range(stages):
            ops, place, own, ends = orders[stage], places[stage], times[stage], sent[stage]
            while place < len(ops):
                op = ops[place]
                source = _source(op, stage, layout, sent)
                if source is None:
                    break
                begin = max(ready[stage], source)
                took = (own.backward if op.backward else own.forward)[op.chunk]
                last = place == len(ops) - 1
                if last or (op.backward and op.chunk == 0 and own.reduces):
                    ready[stage], ends[op] = _reduced(own, op, begin, last, links[stage])
                elif slices > 1:  # sends are posted, and the link does one after the other
                    ready[stage] = begin + took.busy
                    ends[op] = links[stage] = max(links[stage], ready[stage]) + took.sent
                else:
                    ready[stage] = ends[op] = begin + took.busy + took.sent
                place += 1
                left -= 1
            places[stage] = place
    return max(end + own.optimizer + own.gather.both for own, end in zip(times, ready, strict=True))


def _source(op: Op, stage: int, layout: Layout, sent: list[dict[Op, float]]) -> float | None:
    """Return when the neighbour has sent the input of ``op``; None where that is not made yet."""
    step, chunk = (1, op.chunk + 1) if op.backward else (-1, op.chunk - 1)
    if 0 <= stage + step < layout.stages:
        return sent[stage + step].get(op)
    if 0 <= chunk < layout.virtual:
        other = 0 if op.backward else layout.stages - 1
        return sent[other].get(Op(op.backward, chunk, op.micro_batch))
    return 0.0


def _reduced(own: StageTimes, op: Op, begin: float, last: bool, link: float) -> tuple[float, float]:
    """Return when a pass with reductions behind it frees its stage, and when its send has ended.

    ``link``: when the sends posted before have ended.
    """
    took = (own.backward if op.backward else own.forward)[op.chunk]
    reduced, wire, behind = own.behind(took, op.backward and op.chunk == 0, last)
    gone = begin + took.busy - behind + wire
    done = max(link, begin + took.busy) + took.sent
    return max(gone, done) + sum(one.coding for one in reduced), done
