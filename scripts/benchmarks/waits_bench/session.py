"""Train one layout natively, without a wire and compressed, and record some steps of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import one_gpu
from benchmarks.training_bench.cells import REFERENCE, Arm
from benchmarks.training_bench.forked import Job, JobError
from benchmarks.training_bench.gpu_cells import COMPUTE, Options, specs_of
from benchmarks.training_bench.gpu_session import measures, slowest
from benchmarks.training_bench.worker import sent_nbytes

#: steps that an arm never makes
ENDLESS = 10**6


@dataclass(frozen=True)
class Turns:
    """Numbers of steps: before any turn, and of a turn behind its first, which does not count."""

    warm: int
    settling: int  # instead of ``warm`` for arms that measure in their first steps
    steps: int
    timeout: float  # seconds of a start or a turn


@dataclass
class Recorded:
    """Steps of an arm: the traces of its ranks, seconds of steps, bytes of all ranks a step."""

    traces: list[Path]
    seconds: list[float]
    recorded_seconds: list[float]
    sent: float

    def turn(self) -> dict[str, float]:
        """Return ms of a step, ms of a recorded one, and MB a step."""
        return {
            "ms": 1e3 * statistics.median(self.seconds),
            "recorded_ms": 1e3 * statistics.median(self.recorded_seconds),
            "sent_MB": self.sent / 1e6,
        }


class Recordings:
    """Records the arms of one layout, which run side by side and take turns."""

    def __init__(
        self, context: ForkServerContext, options: Options, turns: Turns, say: Callable[[str], None]
    ) -> None:
        self._context, self._options, self._turns, self._say = context, options, turns, say
        self._jobs: dict[str, Job] = {}

    def run(self, layout: str, arms: Sequence[Arm], folder: Path) -> dict[str, Recorded]:
        """Return what was recorded by arm, ``COMPUTE`` among them.

        Traces go to ``folder``. Raises JobError where a rank ends or says nothing for too long.
        """
        began = time.monotonic()
        try:
            for arm in arms:
                if arm.name != COMPUTE:  # the ranks of the native arm do it
                    self._start(layout, arm)
            for arm in arms:
                if arm.name != COMPUTE:
                    self._begin(arm.name)
            self._say(f"{layout}: warm after {time.monotonic() - began:.1f} s")
            found = {arm.name: self._record(layout, arm.name, folder) for arm in arms}
        finally:
            for job in self._jobs.values():
                job.close()
            self._jobs.clear()
        self._say(f"{layout}: recorded after {time.monotonic() - began:.1f} s")
        return found

    def _start(self, layout: str, arm: Arm) -> None:
        specs = specs_of(layout, arm, ENDLESS, one_gpu.free_port(), self._options)
        self._jobs[arm.name] = Job.start(self._context, specs, self._turns.timeout)

    def _begin(self, name: str) -> None:
        """Wait until the ranks are there and make the first steps of an arm."""
        job = self._jobs[name]
        job.answers()
        job.ask("go", self._turns.settling if measures(name) else self._turns.warm, False)

    def _record(self, layout: str, name: str, folder: Path) -> Recorded:
        """Make a turn that nobody records, then one that the profilers of all ranks do."""
        job, steps = self._jobs[REFERENCE if name == COMPUTE else name], self._turns.steps + 1
        stem = folder / f"{layout}.{name.replace(' ', '_')}"
        traces = [stem.with_name(f"{stem.name}.{rank}.json.gz") for rank in range(len(job.pipes))]
        for trace in traces:
            trace.unlink(missing_ok=True)
        before = sent_nbytes("lo")
        plain = slowest(job.ask("go", steps, name == COMPUTE))
        sent = (sent_nbytes("lo") - before) / steps
        slow = slowest(job.ask("go", steps, name == COMPUTE, str(stem)))
        absent = [trace.name for trace in traces if not trace.is_file()]
        if absent:
            raise JobError(f"{name}: no trace of {', '.join(absent)}: {job.why()}")
        self._say(f"  {name}: {1e3 * plain[-1]:.0f} ms, recorded {1e3 * slow[-1]:.0f} ms, "
                  f"{sent / 1e6:.1f} MB")  # fmt: skip
        return Recorded(traces, plain[1:], slow[1:], sent)
