"""Train a layout native, without a wire and compressed, and record some steps of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import one_gpu
from benchmarks.shared import say
from benchmarks.training_bench.cells import REFERENCE, Arm
from benchmarks.training_bench.forked import Job, JobError
from benchmarks.training_bench.gpu_cells import COMPUTE, Options, specs_of
from benchmarks.training_bench.gpu_session import measures, slowest
from benchmarks.training_bench.worker import sent_nbytes

#: more steps than any arm makes
ENDLESS = 10**6


@dataclass(frozen=True)
class Turns:
    """Numbers of steps: ``warm`` before all turns; ``steps`` per turn, after an uncounted one."""

    warm: int
    settling: int  # instead of ``warm``, for arms that measure in their first steps
    steps: int
    timeout: float  # seconds for a start or a turn


def record(
    context: ForkServerContext, options: Options, turns: Turns, layout: str, arms: Sequence[Arm],
    folder: Path,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Record a layout's arms, including ``COMPUTE``; the arms run together and take turns.

    Returns for each arm the names of its ranks' traces in ``folder``, milliseconds per unprofiled
    and per recorded step, and MB per step over all ranks. Raises JobError if a rank ends or times
    out.
    """
    began, jobs = time.monotonic(), dict[str, Job]()
    try:
        for arm in arms:
            if arm.name != COMPUTE:  # the native arm's ranks also run COMPUTE
                specs = specs_of(layout, arm, ENDLESS, one_gpu.free_port(), options)
                jobs[arm.name] = Job.start(context, specs, turns.timeout)
        for name, job in jobs.items():
            job.answers()
            job.ask("go", turns.settling if measures(name) else turns.warm, False)
        say(f"{layout}: warm after {time.monotonic() - began:.1f} s")
        found = {}
        for arm in arms:
            job = jobs[REFERENCE if arm.name == COMPUTE else arm.name]
            found[arm.name] = _recorded(job, layout, arm, turns.steps + 1, folder)
    finally:
        for job in jobs.values():
            job.close()
    say(f"{layout}: recorded after {time.monotonic() - began:.1f} s")
    return found


def _recorded(job: Job, layout: str, arm: Arm, steps: int, folder: Path) -> dict[str, Any]:
    """Run a turn without profilers, then a turn with all ranks' profilers."""
    stem, empty = folder / f"{layout}.{arm.stem}", arm.name == COMPUTE
    traces = [stem.with_name(f"{stem.name}.{rank}.json.gz") for rank in range(len(job.pipes))]
    for trace in traces:
        trace.unlink(missing_ok=True)
    before = sent_nbytes("lo")
    plain = slowest(job.ask("go", steps, empty))
    sent = (sent_nbytes("lo") - before) / steps
    slow = slowest(job.ask("go", steps, empty, str(stem)))
    absent = [trace.name for trace in traces if not trace.is_file()]
    if absent:
        raise JobError(f"{arm.name}: no trace of {', '.join(absent)}: {job.why()}")
    say(f"  {arm.name}: {1e3 * plain[-1]:.0f} ms, recorded {1e3 * slow[-1]:.0f} ms, "
        f"{sent / 1e6:.1f} MB")  # fmt: skip
    return {
        "traces": [trace.name for trace in traces], "ms": 1e3 * statistics.median(plain[1:]),
        "recorded_ms": 1e3 * statistics.median(slow[1:]), "sent_MB": sent / 1e6,
    }  # fmt: skip
