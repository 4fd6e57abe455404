"""Replay the arrivals of jobs under a policy that knows only the jobs that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from hybridcomp.tools.plan.jobs.policies import Evolution, FirstIn, Policy, greedy
from hybridcomp.tools.plan.jobs.state import ClusterState, JobRates, Places, Shape


@dataclass(frozen=True)
class Replayed:
    """Figures of a replayed trace.

    mean_seconds: mean time from a job's arrival to its end. last_seconds: time at which the last
    job ends. changes: how often a running job had to move to other ranks or to wait.
    """

    mean_seconds: float
    last_seconds: float
    changes: int


def compared(tasks: Sequence[JobRates], shape: Shape, pause: float) -> dict[str, Replayed]:
    """Replay ``tasks`` under all policies, and under the best fixed size, known only afterwards."""
    sizes = [replay(tasks, shape, pause, FirstIn(size)) for size in shape.sizes]
    return {
        "first in, first out": replay(tasks, shape, pause, FirstIn()),
        "best fixed size": min(sizes, key=lambda one: one.mean_seconds),
        "greedy": replay(tasks, shape, pause, greedy),
        "evolutionary": replay(tasks, shape, pause, Evolution()),
    }


def replay(tasks: Sequence[JobRates], shape: Shape, pause: float, policy: Policy) -> Replayed:
    """Let ``policy`` decide at every arrival and end, from an empty cluster to the last end."""
    left = {task.name: task.total for task in tasks}
    arrivals = {task.name: task.arrival for task in tasks}
    running: Places = {}
    ready: dict[str, float] = {}  # when a job's pause ends
    done: dict[str, float] = {}
    now, changes = min(arrivals.values()), 0
    while len(done) < len(tasks):
        known = {one.name: one for one in tasks if one.arrival <= now and one.name not in done}
        begun = frozenset(name for name in known if left[name] < known[name].total)
        state = ClusterState(shape, known, left, dict(running), begun, pause)
        places = state.place(policy(state))
        assert places is not None, "a policy gave away more ranks than there are"
        for name, ranks in places.items():
            if running.get(name) != ranks:
                ready[name] = now + (pause if name in begun else 0.0)
        changes += sum(places.get(name) != ranks for name, ranks in running.items())
        rates = {name: known[name].rates[len(ranks)] for name, ranks in places.items()}
        ends = {name: max(now, ready[name]) + left[name] / rate for name, rate in rates.items()}
        then = min([*ends.values(), *(at for at in arrivals.values() if at > now)])
        for name, rate in rates.items():
            left[name] -= max(0.0, then - max(now, ready[name])) * rate
            if ends[name] <= then * (1 + 1e-12):
                done[name] = then
        running = {name: ranks for name, ranks in places.items() if name not in done}
        now = then
    spent = [end - arrivals[name] for name, end in done.items()]
    return Replayed(mean(spent), max(done.values()), changes)
