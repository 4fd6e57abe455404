"""Divide each step of a rank among its causes, so that the parts add up to the step.

Every moment has one cause: compute if any runs, else encoding, else copies, else a message. The
first part of a message's kernel waits for ranks that arrive later. When nothing of the rank runs on
a GPU, the cause is another rank on that GPU, or a queued kernel that waits, or the host, which was
blocked, at work in hybridcomp, or elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.waits_bench.intervals import Stretch, both, length, union, within, without
from benchmarks.waits_bench.lanes import CODEC, COMPUTATION, COPIES, WIRE, Lanes
from benchmarks.waits_bench.traces import UNTOLD, DeviceSpan

LATE, OTHERS, QUEUED = "waits for another rank", "another rank has the GPU", "queued, waits"
BLOCKED, OURS, REST = "host waits for the GPU", "host, in hybridcomp", "host, elsewhere"
#: of a step, in the order in which they are asked for
CAUSES = (COMPUTATION, CODEC, COPIES, WIRE, LATE, OTHERS, QUEUED, BLOCKED, OURS, REST)

Parts = dict[str, list[Stretch]]


def parts_of(ranks: Sequence[Lanes], rank: int, shared: bool) -> list[Parts]:
    """Divide the steps of a rank; ``shared``: all ranks are on one GPU."""
    lanes = ranks[rank]
    late = late_of(ranks, rank)
    others = union(
        stretch
        for other in ranks
        if shared and other is not lanes
        for name in (COMPUTATION, CODEC, COPIES)
        for stretch in other.times[name]
    )
    queued = _queued(lanes)
    order = [
        (COMPUTATION, lanes.times[COMPUTATION]), (CODEC, lanes.times[CODEC]),
        (COPIES, lanes.times[COPIES]), (LATE, late), (WIRE, lanes.times[WIRE]),
        (OTHERS, others if lanes.of else []), (QUEUED, queued), (BLOCKED, lanes.blocked),
        (OURS, lanes.ours),
    ]  # fmt: skip
    return [_divided(step, order) for step in lanes.trace.steps]


def _divided(step: Stretch, order: Sequence[tuple[str, list[Stretch]]]) -> Parts:
    """Give every moment of a step to the first that claims it."""
    left, found = [step], dict[str, list[Stretch]]()
    for name, times in order:
        own = both(left, within(times, step))
        found[name] = own
        left = without(left, own)
    found[REST] = left
    return {name: found[name] for name in CAUSES}


def _queued(lanes: Lanes) -> list[Stretch]:
    """Return the time in which nothing ran, although what ran next had been queued already."""
    found, end = [], 0  # a queue begins empty
    for span in lanes.trace.device:  # by their begin
        if span.start > end:
            known = span.start if span.launch is None else span.launch.stop
            found.append((max(end, known), span.start))
        end = max(end, span.stop)
    return union(found)


def late_of(ranks: Sequence[Lanes], rank: int) -> list[Stretch]:
    """Return when a rank's NCCL kernels waited for a rank that came to the message later.

    The n-th message of a group is the same one on all of its ranks. Where one of them has another
    number of them the trace has not all of them, and none of the group is divided; nor are messages
    between pairs, where it is not told which two of several ranks they are.
    """
    found = []
    own = messages_of(ranks[rank])
    for group, kernels in own.items():
        if group == UNTOLD and len(ranks) > 2:
            continue
        same = [messages_of(lanes).get(group, []) for lanes in ranks]
        members = [each for each in same if each]
        if any(len(each) != len(kernels) for each in members):
            continue
        for place, kernel in enumerate(kernels):
            last = max(each[place].start for each in members)
            found.append((kernel.start, min(last, kernel.stop)))
    return union(found)


def messages_of(lanes: Lanes) -> dict[str, list[DeviceSpan]]:
    """Return NCCL's kernels of the steps by group, in the order in which they were queued."""
    found: dict[str, list[DeviceSpan]] = {}
    first = lanes.trace.steps[0][0]
    for span in lanes.trace.device:
        if lanes.of.get(span) == WIRE and span.start >= first:
            found.setdefault(span.group, []).append(span)
    for kernels in found.values():
        kernels.sort(key=lambda s: s.start if s.launch is None else s.launch.start)
    return found


def beside(lanes: Lanes, name: str, steps: Sequence[Stretch]) -> tuple[int, int]:
    """Return how long a lane was busy in ``steps``, and how much of that beside computation."""
    own = [part for step in steps for part in within(lanes.times[name], step)]
    return length(own), length(both(own, lanes.times[COMPUTATION]))
