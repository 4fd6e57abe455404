"""Plans that are trained side by side: planner's files, one job each, steps in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan_bench.speed import fast
from bench.training_bench.cells import Layout as Place
from bench.training_bench.measure import by_step
from bench.training_bench.runners import CellError, InLab
from bench.training_bench.session import Session
from bench.training_bench.turns import Job as Turns
from hybridcomp.compare.launch import fill
from hybridcomp.plan.answer import files
from hybridcomp.plan.cost.calibrate import calibrated
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.models.reading import read_model
from hybridcomp.plan.plan import Plan
from hybridcomp.plan.request import Batch, SearchLimits
from lab.cluster import Lab
from lab.layout import PORT, LabError
from lab.slow_processors import KEEP_MEMORY
from lab.team import Team

ROOT = Path(__file__).resolve().parents[3]
WORKER = ROOT / "scripts" / "bench" / "training_bench" / "worker.py"
#: seconds that a start, a step or a measurement may take
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Model:
    """The example GPT that is trained, and what a step of it is."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    vocabulary: int = 257
    samples: int = 16
    micro_batch: int = 2

    @property
    def words(self) -> list[str]:
        """Those of train_gpt.py."""
        return ["--layers", str(self.layers), "--width", str(self.width),
                "--heads", str(self.heads), "--length", str(self.length)]  # fmt: skip

    @property
    def block(self) -> str:
        """Return the argument of ``hybridcomp measure --block``."""
        return f"{self.micro_batch}x{self.length}x{self.width}x{self.heads}"

    def job(self, cluster: Cluster) -> PlannedJob:
        """Return the training's job on a cluster, by the cluster's measurement alone."""
        limits = SearchLimits(dtype="fp32", recompute=False)
        words = ["train_gpt.py", *self.words, "--vocabulary", str(self.vocabulary)]
        batch = Batch(self.samples, self.length)
        return calibrated(PlannedJob(read_model(words), cluster, batch, limits))


class Preceded(InLab):
    """Ranks of a lab whose commands stand behind some words, and that keep memory they freed."""

    def __init__(self, lab: Lab, before: Sequence[str]) -> None:
        super().__init__(lab)
        self._before = list(before)

    def started(
        self, command: list[str], layout: Place, env: dict[str, str]
    ) -> AbstractContextManager[Team]:
        """Start ``command`` on every rank; see ``Runner``."""
        words = [*self._before, sys.executable, *command]
        own = {**env, **KEEP_MEMORY, "MASTER_PORT": str(next(self._ports))}
        team: AbstractContextManager[Team] = self.lab.started(words, env=own)
        return team


def measured(
    lab: Lab, model: Model, path: Path, seconds: float, before: Sequence[str] = ()
) -> None:
    """Run ``hybridcomp measure`` on the ranks of ``lab``. Raises LabError with what it said."""
    words = [*before, sys.executable, "-m", "hybridcomp.measure", "--out", str(path),
             "--seconds", str(seconds), "--block", model.block]  # fmt: skip
    # trainings that wait for their turns hold ports from the lab's own on
    env = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "MASTER_PORT": str(PORT - 1)}
    env |= KEEP_MEMORY
    result = lab.run(words, env=env, timeout=PATIENCE_S)
    if result.status:
        failed = next(i for i, status in enumerate(result.statuses) if status)
        raise LabError(result.outputs[failed][-3000:])


def session(lab: Lab, ranks: int, before: Sequence[str] = ()) -> Session:
    """Return a session of trainings on all ranks of ``lab``, one a node."""
    place = Place("ds_zero1_baseline.json", str(ranks), ("dp",))
    return Session(Preceded(lab, before), place, PATIENCE_S)


def started(
    jobs: Session, plan: Plan, cluster: Cluster, model: Model, data: Path, folder: Path, steps: int,
    **settings: Any,
) -> Turns:  # fmt: skip
    """Start a training of ``plan`` with the planner's files, and ``settings`` on top.

    Raises CellError where none starts.
    """
    base = json.loads((ROOT / "configs" / "ds_zero1_baseline.json").read_text()) | settings
    words = [
        "-m", "hybridcomp.run", str(WORKER), "train_gpt", *model.words, "--data", str(data),
        "--steps", str(steps), "--pp", "{stages}", "--cuts", "{cuts}", "--eval-batches", "0",
        "--print-every", "100000", "--deepspeed_config", "{config}",
    ]  # fmt: skip
    files.write(plan, cluster, folder, base, words)
    job = jobs.start(fill(words, files.places(plan, cluster, folder)))
    if job.over:
        jobs.steps(job)  # raises with what it said
        raise CellError(f"{plan.layout}: it ended before its first step")
    return job


def turns(jobs: Sequence[Turns], count: int, between: Turns | None = None) -> None:
    """Let every job make ``count`` steps, each after the other, and ``between`` one after each.

    Raises CellError where one ends.
    """
    for number in range(count):
        for job in jobs if number % 2 == 0 else reversed(jobs):
            for one in (job,) if between is None else (job, between):
                one.step()
                if one.over:
                    raise CellError("a training ended before its last turn")


def seconds(job: Turns, first: int) -> float:
    """Return seconds of the slowest rank: the fastest half of the steps from ``first`` on."""
    return fast(by_step([steps[first:] for steps in job.said]))


def losses(job: Turns) -> list[float]:
    """Return the loss of every step, as the last rank says it."""
    said: list[dict[str, Any]] = list(job.said[-1])
    return [float(step["loss"]) for step in said]
