"""Attribute every moment of a rank's step to one cause, so that the parts add up to the step.

The cause is compute if any runs, else encoding, else copies, else a message, whose kernel first
waits for later ranks. When nothing of the rank runs on the GPU, the cause is another rank on that
GPU, a queued kernel that waits, or the host: blocked, working in hybridcomp, or elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.waits_bench.intervals import Stretch, both, length, union, within, without
from benchmarks.waits_bench.lanes import CODEC, COMPUTATION, COPIES, WIRE, Lanes
from benchmarks.waits_bench.traces import UNTOLD, DeviceSpan

LATE, OTHERS, QUEUED = "waits for another rank", "another rank has the GPU", "queued, waits"
BLOCKED, OURS, REST = "host waits for the GPU", "host, in hybridcomp", "host, elsewhere"
#: causes in order of precedence
CAUSES = (COMPUTATION, CODEC, COPIES, WIRE, LATE, OTHERS, QUEUED, BLOCKED, OURS, REST)

Parts = dict[str, list[Stretch]]


def parts_of(ranks: Sequence[Lanes], rank: int, shared: bool) -> list[Parts]:
    """Divide the steps of a rank; ``shared``: all ranks share one GPU."""
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
    """Assign every moment of a step to the first cause that claims it."""
    left, found = [step], dict[str, list[Stretch]]()
    for name, times in order:
        own = both(left, within(times, step))
        found[name] = own
        left = without(left, own)
    found[REST] = left
    return {name: found[name] for name in CAUSES}


def _queued(lanes: Lanes) -> list[Stretch]:
    """Return the idle time during which the next kernel was already queued."""
    found, end = [], 0  # the queue starts empty
    for span in lanes.trace.device:  # by start time
        if span.start > end:
            known = span.start if span.launch is None else span.launch.stop
            found.append((max(end, known), span.start))
        end = max(end, span.stop)
    return union(found)


def late_of(ranks: Sequence[Lanes], rank: int) -> list[Stretch]:
    """Return when a rank's NCCL kernels waited for a rank that joined the message later.

    Messages are matched across ranks by their index in the group. If ranks recorded different
    numbers of messages, some are missing and the group is left out; so are pairwise messages if the
    trace does not name the two ranks.
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
    """Return NCCL's kernels of the steps by group, in the order they were queued."""
    found: dict[str, list[DeviceSpan]] = {}
    first = lanes.trace.steps[0][0]
    for span in lanes.trace.device:
        if lanes.of.get(span) == WIRE and span.start >= first:
            found.setdefault(span.group, []).append(span)
    for kernels in found.values():
        kernels.sort(key=lambda s: s.start if s.launch is None else s.launch.start)
    return found


def beside(lanes: Lanes, name: str, steps: Sequence[Stretch]) -> tuple[int, int]:
    """Return how long a lane was busy in ``steps``, and how much of that overlaps computation."""
    own = [part for step in steps for part in within(lanes.times[name], step)]
    return length(own), length(both(own, lanes.times[COMPUTATION]))
