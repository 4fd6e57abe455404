"""Time collectives of torch.distributed by group and size, alone and during other work.

All ranks of a group time each case, and the slowest rank counts. Sizes that are far apart come
first, then the sizes between them; sizes that would exceed their share of the time are left out,
and the planner extrapolates linearly.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hybridcomp.autotune.memory_limits import NBYTES, room_for
from hybridcomp.collectives.wire.transport import all_gather_single, reduce_scatter_single
from hybridcomp.tools.measure.clock import (
    LEAST,
    MOST,
    MOST_INNER,
    SHORT_S,
    CallClock,
    Run,
    is_long,
    least_calls,
    least_timings,
)
from hybridcomp.tools.measure.coders import product_beside
from hybridcomp.tools.measure.team import GroupShape, MeasuredPart, Team, sites_of
from hybridcomp.tools.plan.machines.estimates import Curve, Estimate, summary
from hybridcomp.tools.plan.machines.rows import Beside, Operation, Timing

#: bytes of messages in the order in which they are timed; the first gives the constant seconds of a
#: message
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 18, 1 << 22, 1 << 26, 1 << 28)
#: sizes that are also timed during other work
BUSY_SIZES = (1 << 16, 1 << 20, 1 << 24)
COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: this size is never left out: smaller messages take mostly latency and noise, and show no
#: bandwidth
SURE = 1 << 20
#: a larger size is left out if its minimum of calls could take this many allowances
PATIENCE = 2.0
#: collectives of gradients and parameters: up to this size, which no cache holds (a line through
#: sizes that fit into a cache is too flat), they are left out only if they may take more than this
#: share of the whole measurement
LONG: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
LONG_NBYTES, LONG_SHARE = 1 << 24, 0.1
#: seconds after which the receiver surely waits for a message
WAIT_S = 2e-3


@dataclass(frozen=True)
class Key:
    """Messages of one operation, shape and load, of any size."""

    operation: Operation
    shape: GroupShape
    beside: Beside

    @property
    def active(self) -> bool:
        """Return whether this rank takes part."""
        return bool(self.shape.own) and (self.shape.first or self.beside != "alone")


@dataclass(frozen=True)
class TimedCase:
    """Seconds of a case, and the relative compute speed meanwhile; the same on all ranks."""

    seconds: Estimate
    left: Estimate | None = None


def link_rows(
    team: Team, clock: CallClock, part: MeasuredPart, shapes: list[GroupShape], dtype: torch.dtype
) -> list[Timing]:
    """Time all cases; return equal rows on all ranks; a collective over the job."""
    return _rows(team, clock, part, _keys(shapes), dtype)


def uplink_rows(
    team: Team, clock: CallClock, part: MeasuredPart, shape: GroupShape, dtype: torch.dtype
) -> list[Timing]:
    """Time sends between sites, all ranks of a site at once; a collective over the job.

    ``shape``: ``uplink_shape``. One pair of ranks alone may not fill the link that all pairs share.
    Rows have the bytes of all pairs that cross a site's link, so that their seconds are those of
    the whole link.
    """
    sites = sites_of(team.nodes)
    pairs = sum(1 for one, _ in shape.groups if sites[one] == sites[shape.groups[0][0]])
    rows = _rows(team, clock, part, [Key("send", shape, "groups")], dtype)
    return [replace(row, nbytes=row.nbytes * pairs) for row in rows]


def _rows(
    team: Team, clock: CallClock, part: MeasuredPart, keys: list[Key], dtype: torch.dtype
) -> list[Timing]:
    rows: list[Timing] = []
    cases = [(size, key) for size in SIZES for key in keys if _wanted(size, key, keys)]
    most = room_for(team.device) * NBYTES // 3
    product = product_beside(clock, team.device)
    points: dict[Key, list[tuple[float, Estimate]]] = {}
    limits = dict.fromkeys(keys, most)
    for index, (nbytes, key) in enumerate(cases):
        if nbytes > limits[key]:
            continue
        left = sum(size <= limits[other] for size, other in cases[index:])
        allowance, known = part.each(left), points.get(key, [])
        expected = Curve.through(known).at(nbytes).value if nbytes > SURE and known else 0.0
        if expected * least_calls(expected) > _patience(nbytes, key, allowance, part):
            limits[key] = nbytes - 1
            continue
        run = runner(key.operation, key.shape, nbytes, dtype, team) if key.active else None
        found = timed(team, clock, run, key, allowance, product)
        half = 0.5 if key.operation == "send" else 1.0  # the message goes there and back
        left_after = None
        if key.operation == "send" and key.beside == "alone":
            left_after = returned(team, nbytes, dtype, key)
        points.setdefault(key, []).append((float(nbytes), found.seconds))
        rows.append(
            Timing(
                key.operation, key.shape.ranks, key.shape.nodes, nbytes,
                found.seconds.times(half), key.beside, found.left, left_after,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: (row.ranks, row.nodes, row.operation, row.beside))


def _keys(shapes: list[GroupShape]) -> list[Key]:
    """Return the keys to time; keys with concurrent groups only if there are other groups."""
    found = []
    for shape in shapes:
        sends: tuple[Operation, ...] = ("send",) if shape.ranks == 2 else ()
        for operation in (*sends, *COLLECTIVES):
            found.append(Key(operation, shape, "alone"))
            if len(shape.groups) > 1:
                found.append(Key(operation, shape, "groups"))
            found.append(Key(operation, shape, "compute"))
    return found


def _patience(nbytes: int, key: Key, allowance_s: float, part: MeasuredPart) -> float:
    """Return the most seconds that a case may take."""
    own = PATIENCE * allowance_s
    if key.operation in LONG and key.beside != "compute" and nbytes <= LONG_NBYTES:
        return max(own, LONG_SHARE * part.whole_s)
    return own


def _wanted(nbytes: int, key: Key, keys: Sequence[Key]) -> bool:
    return len(keys) == 1 or key.beside == "alone" or nbytes in BUSY_SIZES


def timed(
    team: Team, clock: CallClock, run: Run | None, key: Key, allowance_s: float,
    product: tuple[Run, float],
) -> TimedCase:  # fmt: skip
    """Time ``run`` on all ranks that have a run, at the same time; a collective over the job.

    All ranks begin each timing together, so that no timing includes a wait for a late rank.
    """
    runs: dict[str, Run] = {} if run is None else {key.operation: run}
    if key.beside != "compute":
        return TimedCase(in_turns(team, clock, [key.operation], runs, allowance_s)[key.operation])
    once = max(_first_calls(team, clock, [key.operation], runs)[key.operation], 1e-9)
    count = max(least_timings(once), min(MOST, int(allowance_s / once) - 2))
    seconds, lost = [0.0] * count, [0.0] * count
    for index in range(count):
        team.barrier()
        if run is not None:
            seconds[index], left = clock.beside(run, *product, once)
            lost[index] = 1 - left
    slowest, most = summary(team.most(seconds)), summary(team.most(lost))
    return TimedCase(slowest, Estimate(1 - most.value, 1 - most.high, 1 - most.low))


def in_turns(
    team: Team, clock: CallClock, names: Sequence[str], runs: Mapping[str, Run], allowance_s: float
) -> dict[str, Estimate]:
    """Time every run in turns, round by round; a collective over the job.

    ``runs``: this rank's calls by name; empty if this rank only waits for other ranks. Returns the
    slowest rank's seconds per call, by name.
    """
    slowest = _first_calls(team, clock, names, runs)
    mean = sum(slowest.values()) / len(names)
    inner = {name: min(MOST_INNER, max(1, round(SHORT_S / max(once, 1e-9))))
             for name, once in slowest.items()}  # fmt: skip
    whole = max(1e-9, sum(slowest[name] * inner[name] for name in names))
    count = max(least_timings(mean), min(MOST, int(allowance_s / whole) - 2))
    seconds: dict[str, list[float]] = {name: [0.0] * count for name in names}
    for index in range(count):
        for name in names if index % 2 == 0 else reversed(names):
            team.barrier()
            if runs:
                seconds[name][index] = clock.seconds(runs[name], inner[name])
    return {name: summary(team.most(own)) for name, own in seconds.items()}


def _first_calls(
    team: Team, clock: CallClock, names: Sequence[str], runs: Mapping[str, Run]
) -> dict[str, float]:
    """Return the slowest rank's seconds of a second call, by name; of the first if it is long."""
    slowest: dict[str, float] = {}
    for _ in range(2):
        once = []
        for name in names:
            team.barrier()
            once.append(clock.seconds(runs[name]) if runs else 0.0)
        slowest = dict(zip(names, team.most(once), strict=True))
        if is_long(sum(slowest.values()) / len(names)):
            break
    return slowest


def returned(team: Team, nbytes: int, dtype: torch.dtype, key: Key) -> Estimate | None:
    """Time sends to a waiting receiver until the call returns; a collective over the job.

    None on GPUs, where a call returns at once and its stream waits for all of the message.
    """
    if team.device.type != "cpu":
        return None
    values = torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype)
    seconds = [0.0] * LEAST
    for index in range(LEAST):
        team.barrier()
        if not key.active:
            continue
        one, two = key.shape.own
        if team.rank == two:
            dist.recv(values, one, group=key.shape.group)
            continue
        time.sleep(WAIT_S)  # by then the receiver is waiting for the message
        start = time.perf_counter()
        dist.send(values, two, group=key.shape.group)
        seconds[index] = time.perf_counter() - start
    return summary(team.most(seconds))


def runner(
    operation: Operation, shape: GroupShape, nbytes: int, dtype: torch.dtype, team: Team
) -> Run:
    """Build one call of ``operation`` on this rank's group; a send goes there and back.

    Messages hold zeros, so that repeated sums do not grow.
    """
    size, group = shape.ranks, shape.group
    numel = max(1, nbytes // dtype.itemsize // size) * size
    values = torch.zeros(numel, dtype=dtype, device=team.device)
    if operation == "send":
        return _there_and_back(values, shape, team)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(values, group=group)
    own = values[: numel // size]
    if operation == "all_gather":
        shard = torch.zeros_like(own)
        return lambda: all_gather_single(values, shard, group=group)
    if operation == "reduce_scatter":
        out = torch.zeros_like(own)
        return lambda: reduce_scatter_single(out, values, group=group)
    room = torch.zeros_like(values)
    return lambda: dist.all_to_all_single(room, values, group=group)


def _there_and_back(values: torch.Tensor, shape: GroupShape, team: Team) -> Run:
    one, two = shape.own
    group = shape.group

    def begin() -> None:
        dist.send(values, two, group=group)
        dist.recv(values, two, group=group)

    def answer() -> None:
        dist.recv(values, one, group=group)
        dist.send(values, one, group=group)

    return begin if team.rank == one else answer
