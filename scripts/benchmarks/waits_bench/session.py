"""Train a layout native, without a wire and compressed, and record some steps of each."""

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

#: more steps than any arm makes
ENDLESS = 10**6


@dataclass(frozen=True)
class Turns:
    """Numbers of steps: before the turns, and in a turn after its uncounted first step."""

    warm: int
    settling: int  # instead of ``warm``, for arms that measure in their first steps
    steps: int
    timeout: float  # seconds for a start or a turn


@dataclass
class Recorded:
    """An arm's steps: traces of its ranks, seconds per step, bytes per step over all ranks."""

    traces: list[Path]
    seconds: list[float]
    recorded_seconds: list[float]
    sent: float

    def turn(self) -> dict[str, float]:
        """Return ms per step, ms per recorded step, and MB per step."""
        return {
            "ms": 1e3 * statistics.median(self.seconds),
            "recorded_ms": 1e3 * statistics.median(self.recorded_seconds),
            "sent_MB": self.sent / 1e6,
        }


class Recordings:
    """Records the arms of a layout, which run together and take turns."""

    def __init__(
        self, context: ForkServerContext, options: Options, turns: Turns, say: Callable[[str], None]
    ) -> None:
        self._context, self._options, self._turns, self._say = context, options, turns, say
        self._jobs: dict[str, Job] = {}

    def run(self, layout: str, arms: Sequence[Arm], folder: Path) -> dict[str, Recorded]:
        """Return the recordings by arm, including ``COMPUTE``.

        Traces go to ``folder``. Raises JobError if a rank ends or times out.
        """
        began = time.monotonic()
        try:
            for arm in arms:
                if arm.name != COMPUTE:  # the native arm's ranks run it too
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
        """Wait until the ranks are ready, and run an arm's first steps."""
        job = self._jobs[name]
        job.answers()
        job.ask("go", self._turns.settling if measures(name) else self._turns.warm, False)

    def _record(self, layout: str, name: str, folder: Path) -> Recorded:
        """Run a turn without profilers, then a turn with all ranks' profilers."""
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
