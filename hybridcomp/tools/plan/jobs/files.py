"""Write the files that start each job on its new ranks, or resume it there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybridcomp import escaping
from hybridcomp.errors import ConfigError
from hybridcomp.tools.commands.replan import GENERAL, saved_job
from hybridcomp.tools.compare.launch import fill
from hybridcomp.tools.plan.answer import files as plan_files
from hybridcomp.tools.plan.answer.base import base_of
from hybridcomp.tools.plan.answer.start_command import PORT, write_script
from hybridcomp.tools.plan.jobs.rates import Rates, has_saved
from hybridcomp.tools.plan.jobs.request import Job, JobList
from hybridcomp.tools.plan.jobs.state import Places, Shape

#: names of the files: the jobs after this decision, to start the next one from; predicted steps
NEXT, TABLE = "next.json", "table.json"


def write(
    jobs: JobList, places: Places, rates: Rates, shape: Shape, kept: Sequence[Any], folder: Path
) -> list[Path]:
    """Write a folder for each job that starts or changes, and the files ``NEXT`` and ``TABLE``.

    Returns the scripts that start jobs. Raises HybridcompError where an engine's file cannot hold
    a plan; some files may have been written by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starts = []
    for job in jobs.jobs:
        ranks = places.get(job.name, ())
        if ranks and ranks != job.ranks.now:
            starts.append(_start(job, ranks, rates, shape, folder / job.name))
    after = [replace(one, ranks=replace(one.ranks, now=places.get(one.name, ())))
             for one in jobs.jobs]  # fmt: skip
    then = asdict(replace(jobs, jobs=tuple(after), population=tuple(kept)))
    (folder / NEXT).write_text(escaping.json_document(then), encoding="utf-8")
    (folder / TABLE).write_text(json.dumps(rates.known, indent=0) + "\n", encoding="utf-8")
    return starts


def _start(job: Job, ranks: tuple[int, ...], rates: Rates, shape: Shape, folder: Path) -> Path:
    """Write the start.sh of one job, and the files it names."""
    options, cluster = rates.options, rates.cluster
    nodes = [number for number, node in enumerate(shape.nodes) if set(node) & set(ranks)]
    per_node = len(ranks) // len(nodes)
    port = int(PORT) + ranks[0]
    values = {"{nodes}": len(nodes), "{node_ranks}": per_node, "{port}": port,
              "{node}": ",".join(map(str, nodes))}  # fmt: skip
    command = fill(job.command, {place: str(value) for place, value in values.items()})
    devices = [shape.nodes[nodes[0]].index(rank) for rank in ranks if rank in shape.nodes[nodes[0]]]
    before = _slurm(job.name, len(nodes), per_node, cluster.on_cpu)
    if options.scheduler == "plain":
        before = [f"# on node {values['{node}']}"]
        if per_node < shape.of_node and not cluster.on_cpu:
            before.append(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, devices))}")
            _refuse_filters(job)
    plan = rates.found(job, len(ranks)).plans[0]
    saved, is_deepspeed = saved_job(Path(str(job.checkpoint))) if has_saved(job) else (None, True)
    base = base_of(Path(job.base), options.engine) if job.base else saved.settings if saved else {}
    if saved is None:
        return plan_files.write(plan, cluster, folder, base, command, None, before, port)[-1]
    goes_on = ["hybridcomp", "replan", job.checkpoint, "--ranks", len(ranks), "--stages",
               plan.layout.stages, "--samples", job.samples, "--micro-batch",
               plan.layout.micro_batch, "--out", folder / "replanned"]  # fmt: skip
    if is_deepspeed:
        config = plan_files.write(plan, cluster, folder, base, command)[1]
        goes_on += ["--base", config]
    if not command and len(nodes) == 1:  # replan's own, with the job's port
        end = ("--deepspeed_config", "{config}") if is_deepspeed else ()
        command = [*GENERAL[:3], "--master-port", str(port), *GENERAL[3:], *end]
    words = [*goes_on, *(["--", *command] if command else [])]
    then = ["exec", folder / "replanned" / plan_files.START_FILE]
    folder.mkdir(parents=True, exist_ok=True)
    start = folder / plan_files.START_FILE
    write_script(
        start, [*before, "set -e", escaping.shell_words(words), escaping.shell_words(then)]
    )
    return start


def _refuse_filters(job: Job) -> None:
    """Raise ConfigError for a command that starts the job on other devices of its node."""
    filters = [word for word in job.command if word.startswith(("--num_gpus", "--num_nodes"))]
    if filters and any(Path(word).name == "deepspeed" for word in job.command):
        todo = (
            "DeepSpeed's launcher then takes the node's first GPUs, not those of the job "
            "(CUDA_VISIBLE_DEVICES); leave it out, or start the job with torchrun"
        )
        raise ConfigError(f"{job.name}: command", filters[0], todo)


def _slurm(name: str, nodes: int, per_node: int, on_cpu: bool) -> list[str]:
    """Return sbatch's options; ``singleton`` makes a job wait for the previous one of its name."""
    options = [f"--job-name={name}", "--dependency=singleton", f"--nodes={nodes}",
               "--ntasks-per-node=1"]  # fmt: skip
    share = f"--cpus-per-task={per_node}" if on_cpu else f"--gpus-per-node={per_node}"
    return [f"#SBATCH {one}" for one in [*options, share]]
