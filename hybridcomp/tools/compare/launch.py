"""Train the runs to compare: one launcher command, several blocks, several seeds."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.channels.accounting.ledger_file import set_aside
from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.tools.compare.children import run_logged
from hybridcomp.tools.compare.json_lines import LOG
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.compare.trained import OUTPUT, last_line, last_step
from hybridcomp.tools.progress import ProgressDisplay

BASELINE = "baseline"
#: name of the ledger's file in the folder of a run
LEDGER = "ledger.jsonl"
CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config")
#: flag of Hugging Face's Trainer, followed by a file; DeepSpeed's own flag has no value
TRAINER_FLAG = "--deepspeed"
MODULE = "hybridcomp.run"
#: lines of a failed training's output that are shown, and most characters of its first error
TAIL, MOST_WORDS = 20, 300
#: the last line of a traceback, which torch prefixes with the rank; or an error line of ours
ERROR = re.compile(
    r"(\[(default)?\d*\]:?\s?)?(\[rank\d+\]: )?([\w.]*(Error|Exception)|hybridcomp): ."
)


@dataclass(frozen=True)
class LaunchedTraining:
    """One training: a process that is not started again after it has finished."""

    name: str  # name in messages
    folder: Path
    command: Sequence[str]
    #: facts that identify the job, kept in done.json: if they change, the job runs again
    settings: Any
    # variables added to those of this process
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, watch: Callable[[float, Path], object] | None = None, every: float | None = None
    ) -> float | None:
        """Train; return the seconds, or None if it had finished before. Raises CompareError.

        ``watch`` is called every ``every`` seconds with the seconds so far and the folder.
        """
        done = self.folder / "done.json"
        if self._has_finished(done):
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        done.unlink(missing_ok=True)
        for name in (LOG, LEDGER):  # of an earlier command: this one may write none
            set_aside(self.folder / name)
        start, output = time.monotonic(), self.folder / OUTPUT

        def look() -> None:
            if watch is not None:
                watch(time.monotonic() - start, self.folder)

        status = run_logged(self.command, output, self.environment, look=look, every=every)
        if status:
            said = output.read_text(errors="replace").splitlines()
            tail = "\n".join(said[-TAIL:])
            why = f"status {status}{_why(said)}"
            raise CompareError(f"{tail}\n{self.name}: {why}; all of it is in {output}")
        done.write_text(json.dumps(self.settings))
        return time.monotonic() - start

    def _has_finished(self, done: Path) -> bool:
        """Return whether this very job wrote ``done`` at its end."""
        try:
            return bool(parsed_json(done.read_text(encoding="utf-8")) == self.settings)
        except (FileNotFoundError, ValueError):
            return False


class TrainingProgress:
    """Shows the progress of a command's trainings, which all take equally many steps."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self._progress = progress
        # finished trainings; steps of a training, 0 until one has finished
        self._done, self._steps = 0, 0

    def run(self, job: LaunchedTraining, name: str) -> float | None:
        """Run the next training; return its seconds, None if it had finished before."""
        self._progress.show(self._done, f"{name}: training")
        try:
            seconds = job.run(lambda *told: self._look(name, *told), self._progress.every)
        finally:
            self._done += 1
        if seconds is None:
            self._progress.skip()
        self._steps = last_step(job.folder) or self._steps
        return seconds

    def _look(self, name: str, seconds: float, folder: Path) -> None:
        share = min(1.0, last_step(folder) / self._steps) if self._steps else 0.0
        text = f"{name}: {seconds:.0f} s, {last_line(folder) or 'nothing logged yet'}"
        self._progress.show(self._done + share, text)


def _why(said: Sequence[str]) -> str:
    """Return ": " and the first error in a training's output, with its rank where one is named."""
    words = (line.strip() for line in said)
    return next((f": {one_line(line, MOST_WORDS)}" for line in words if ERROR.match(line)), "")


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ledger_in(block: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``block`` with its ledger in the folder of the run."""
    ledger = {**block.get("ledger", {}), "jsonl": str(folder / LEDGER)}
    return {**block, "ledger": ledger}


@dataclass(frozen=True)
class RunPlan:
    """The trainings of ``--launch``: a command, blocks and seeds."""

    command: Sequence[str]
    blocks: Mapping[str, dict[str, Any] | None]  # name -> block; the baseline, None, comes first
    seeds: Sequence[int]
    out: Path
    project: str | None = None  # W&B project, switched on in the DeepSpeed file
    group: str = ""

    def jobs(self) -> list[LaunchedTraining]:
        """List the jobs seed by seed, so that an interrupted launch has whole seeds."""
        if len(self.seeds) > 1 and not any("{seed}" in word for word in self.command):
            raise CompareError(
                f"--seeds: found {len(self.seeds)} seeds and a command without {{seed}}; write "
                "{seed} where the command takes its seed"
            )
        return [self.job(name, seed) for seed in self.seeds for name in self.blocks]

    def job(self, name: str, seed: int) -> LaunchedTraining:
        """Write the files of one training and return its job. Raises CompareError."""
        folder = (self.out / name / f"seed{seed}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        block = self.blocks[name]
        written = None if block is None else ledger_in(block, folder)
        environment = {
            "WANDB_DIR": str(folder),
            "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
            "WANDB_RUN_GROUP": self.group,
            "WANDB_NAME": f"{name} seed {seed}",
        }
        command = armed(self.command)
        if not any("{folder}" in word and LOG in word for word in command):
            environment["HYBRIDCOMP_RECORD"] = str(folder / LOG)
        place = config_of(command)
        settings: dict[str, Any] = {}
        if place is not None:
            number, prefix, source = place
            settings = self._settings(Path(source), written)
            config = folder / "ds_config.json"
            config.write_text(json.dumps(settings, indent=1))
            command[number] = f"{prefix}{config}"
        elif written is not None:
            file = folder / "block.json"
            file.write_text(json.dumps(written, indent=1))
            environment["HYBRIDCOMP_CONFIG"] = str(file)
        values = {"{seed}": str(seed), "{folder}": str(folder), "{port}": str(free_port())}
        words = list(self.command)
        done = {"command": words, "seed": seed, "block": block, "settings": settings}
        return LaunchedTraining(
            f"{name} seed {seed}", folder, fill(command, values), done, environment
        )

    def _settings(self, source: Path, block: dict[str, Any] | None) -> dict[str, Any]:
        """Read the DeepSpeed file, set or drop its block, and add W&B. Raises CompareError."""
        try:
            found = parsed_json(source.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CompareError(f"{source}: expected a DeepSpeed file in JSON ({error})") from None
        if not isinstance(found, dict) or not isinstance(found.get("wandb", {}), dict):
            key = ', "wandb" an object' if isinstance(found, dict) else ""
            raise CompareError(f"{source}: expected a DeepSpeed file in JSON, an object{key}")
        settings: dict[str, Any] = found
        settings.pop("compression", None)
        if block is not None:
            settings["compression"] = block
        if self.project is not None:
            own = {"enabled": True, "project": self.project, "group": self.group}
            settings["wandb"] = {**settings.get("wandb", {}), **own}
        return settings


def fill(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace the placeholders of ``command`` by ``values``; placeholders in values stay."""
    places = re.compile("|".join(map(re.escape, values)))
    return [places.sub(lambda found: values[found[0]], word) for word in command]


def config_of(command: Sequence[str]) -> tuple[int, str, str] | None:
    """Find the DeepSpeed file: ``(index of its word, prefix in that word, path)``, or None."""
    for number, word in enumerate(command):
        flag, equals, path = word.partition("=")
        if not equals:
            path = command[number + 1] if number + 1 < len(command) else ""
        if not path:
            continue
        if flag in CONFIG_FLAGS or (flag == TRAINER_FLAG and path.endswith(".json")):
            return (number, f"{flag}=", path) if equals else (number + 1, "", path)
    return None


def armed(command: Sequence[str]) -> list[str]:
    """Insert ``hybridcomp.run`` between launcher and script. Raises CompareError.

    A command that has the module already is unchanged. Without the module blocks have no effect.
    """
    words = list(command)
    if MODULE in words:
        return words
    place = next((i for i, word in enumerate(words) if i and word.endswith(".py")), None)
    flag = {"deepspeed": "--module", "torchrun": "-m"}.get(Path(words[0]).name, "-m")
    launchers = ("python", "deepspeed", "torchrun", "accelerate")
    plain = Path(words[0]).name.startswith(launchers)
    if place is None or not plain or words[place - 1] in ("-m", "--module"):
        raise CompareError(
            f"{' '.join(words)[:80]}: found no place for hybridcomp; write the command with "
            "--module hybridcomp.run (deepspeed) or -m hybridcomp.run (torchrun, python, "
            "accelerate launch) before the script, or have the script call hybridcomp.install()"
        )
    return [*words[:place], flag, MODULE, *words[place:]]


def block_of(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``(name, block)`` from ``PRESET``, ``NAME=PRESET``, ``NAME=FILE`` or ``NAME={..}``.

    Raises CompareError, ConfigError.
    """
    from hybridcomp.config import BLOCK, CompressionConfig, read_source

    name, equals, value = text.partition("=")
    value = value if equals else name
    name = name if equals else Path(name).stem
    if value.startswith("{"):
        try:
            block: dict[str, Any] = parsed_json(value)
        except ValueError as error:
            raise CompareError(f"--candidate {name}: expected JSON ({error})") from None
    elif Path(value).is_file():
        whole = dict(read_source(value))
        block = whole.get(BLOCK, whole)
    else:
        block = {"preset": value}
    CompressionConfig.parse(block)
    if name == BASELINE or not name:
        raise CompareError(f"--candidate {text}: expected another name than {BASELINE!r}")
    if name != Path(name).name or name == ".." or "\0" in name:
        todo = "it names the folder of its runs; expected a name without / that is not .."
        raise CompareError(f"--candidate {name!r}: {todo}")
    return name, block


def train(plan: RunPlan) -> list[str]:
    """Train all unfinished runs; return ``NAME=FOLDERS`` words to compare. Raises CompareError.

    The folders are those of the plan's seeds: earlier calls may have left others.
    """
    if shutil.which(plan.command[0]) is None:
        raise CompareError(f"{plan.command[0]}: no such command")
    jobs = plan.jobs()
    with ProgressDisplay(len(jobs)) as progress:
        progress.say(
            f"training {len(jobs)} runs; what each prints is in {plan.out}/*/seed*/{OUTPUT}"
        )
        trainings = TrainingProgress(progress)
        for number, job in enumerate(jobs, 1):
            place = f"{number}/{len(jobs)} {job.name}"
            seconds = trainings.run(job, place)
            done = "there already" if seconds is None else f"done in {seconds:.0f} s"
            progress.say(f"{place}: {done}")
    folders = {
        name: [plan.out / name / f"seed{seed}" for seed in plan.seeds] for name in plan.blocks
    }
    return [f"{name}={','.join(map(str, dict.fromkeys(some)))}" for name, some in folders.items()]
