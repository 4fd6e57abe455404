"""Run the best plans for some steps each on the machines, and keep the fastest (``--try``)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridcomp.errors import ConfigError
from hybridcomp.tools.compare.launch import LaunchedTraining, TrainingProgress, fill, free_port
from hybridcomp.tools.compare.reading import read_runs
from hybridcomp.tools.compare.runs import WARM_UP, CompareError
from hybridcomp.tools.plan.answer import files, start_command
from hybridcomp.tools.plan.answer.base import Base
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.progress import ProgressDisplay

#: placeholders of a command; it needs one of them if the plans differ in that field
DECIDED = {
    "tensor": ("{tensor}",),
    "stages": ("{stages}",),
    "cuts": ("{cuts}", "{layers}"),
    "context": ("{context}",),
    "expert": ("{expert}",),
    "recompute": ("{recompute}",),
    "mesh": ("{mesh}",),
    "slices": ("{slices}",),
    "context_way": ("{context_way}",),
}
#: fields of a plan that decide, beside its layout and block, whether it has run before
IDENTITY = ("model", "length", "dtype", "engine")
NO_COMMAND = "expected -- and the command of a training behind it, such as -- deepspeed ..."
RECORD = "HYBRIDCOMP_RECORD"
LOG, LEDGER = "loss.jsonl", "ledger.jsonl"


@dataclass(frozen=True)
class TriedPlan:
    """One plan that ran: its median seconds a step, and the folder of its files."""

    plan: Plan
    folder: Path
    seconds: float

    @property
    def miss(self) -> float:
        """Return the measured step over the predicted one, minus 1."""
        return self.seconds / self.plan.prediction.seconds - 1


def check_command(command: Sequence[str], plans: Sequence[Plan]) -> None:
    """Raise ConfigError if the plans differ in a field for which ``command`` has no placeholder."""
    if not command:
        raise ConfigError("--try", "no command", NO_COMMAND)
    text = " ".join(command)
    engine = plans[0].engine
    place = "{block}" if engine == "megatron" else "{config}"
    if place not in text and "{folder}" not in text:
        todo = f"write {place} where it takes its configuration"
        raise ConfigError("--try", f"a command without {place}", todo)
    for name, places in DECIDED.items():
        values = {getattr(plan.layout, name) for plan in plans if _matters(plan, name)}
        if len(values) > 1 and not any(one in text for one in places):
            shown = ", ".join(sorted(map(str, values)))
            raise ConfigError(
                "--try", f"a command without {places[0]}",
                f"the plans differ in {name} ({shown}); write {places[0]} where it takes that, or "
                f"fix it with --fix {name}=...",
            )  # fmt: skip


def _matters(plan: Plan, name: str) -> bool:
    """Return whether a field changes the run: cuts need 2 stages, a context way 2 context ranks."""
    needed = {"cuts": plan.layout.stages, "context_way": plan.layout.context}
    return needed.get(name, 2) > 1


def tried(
    plans: Sequence[Plan],
    cluster: Cluster,
    command: Sequence[str],
    out: Path,
    base: Base,
    say: Callable[[str], object] = print,
) -> list[TriedPlan]:
    """Run ``command`` for each plan, one after the other; return them, the fastest first.

    Plans that have run before are not run again. Raises CompareError where none of them ran,
    ConfigError for a command that cannot run these plans.
    """
    check_command(command, plans)
    found: list[TriedPlan] = []
    failed: list[str] = []
    with ProgressDisplay(len(plans), say) as progress:
        trainings = TrainingProgress(progress)
        for number, plan in enumerate(plans, 1):
            folder = (out / f"try{number}").resolve()
            job = _job(plan, cluster, command, folder, base)
            try:
                trainings.run(job, f"trying {number} of {len(plans)}: {plan.layout}")
                seconds = seconds_a_step(folder / LOG, plan)
            except CompareError as error:
                failed.append(f"plan {number}, {str(error).splitlines()[-1]}")
                progress.say(f"  failed: {str(error).splitlines()[-1]}")
                continue
            found.append(TriedPlan(plan, folder, seconds))
            progress.say(f"  {seconds:.4g} s a step, predicted {plan.prediction.seconds:.4g} "
                         f"({found[-1].miss:+.1%})")  # fmt: skip
    if not found:
        raise CompareError("--try: no plan ran; " + failed[-1])
    return sorted(found, key=lambda one: one.seconds)


def _job(
    plan: Plan, cluster: Cluster, command: Sequence[str], folder: Path, base: Base
) -> LaunchedTraining:
    """Write the files of one training and return its job."""
    _, config, *_ = files.write(plan, cluster, folder, base, command, folder / LEDGER)
    values = start_command.places(plan, cluster, folder)
    words = fill(command, {**values, "{folder}": str(folder), "{port}": str(free_port())})
    log = folder / LOG
    own = any(LOG in word for word in words)
    environment = {} if own else {RECORD: str(log)}
    if plan.engine in start_command.BESIDE:
        environment["HYBRIDCOMP_CONFIG"] = str(folder / start_command.BLOCK_FILE)
    written = plan.to_json()
    identity = {name: written[name] for name in (*IDENTITY, "layout", "block", "machines")}
    settings = {"command": list(command), **identity, "config": config.read_text(encoding="utf-8")}
    known = json.loads(json.dumps(settings))  # tuples become lists, as they do in the file
    return LaunchedTraining(f"{plan.layout}", folder, words, known, environment)


def seconds_a_step(log: Path, plan: Plan) -> float:
    """Return median seconds a step of a finished run, without warm-up. Raises CompareError."""
    tokens = plan.layout.samples * plan.length
    speeds = read_runs([f"run={log}"], LEDGER)[0].trainings[0].speeds
    if speeds is None or len(speeds) <= WARM_UP:
        steps = 0 if speeds is None else len(speeds)
        raise CompareError(f"{log}: found {steps} timed steps; train at least {WARM_UP + 1}")
    return tokens / statistics.median(float(value) for value in speeds[WARM_UP:])
