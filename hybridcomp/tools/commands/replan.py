"""Prepare a checkpoint and its files to resume on other ranks: ``hybridcomp replan``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp import escaping
from hybridcomp.elastic import batches
from hybridcomp.elastic.checkpoints import SavedJob
from hybridcomp.errors import ConfigError

DESCRIPTION = """\
Make a checkpoint ready to be resumed on another number of ranks:

  hybridcomp replan checkpoints/ --ranks 2 -- torchrun --nproc-per-node {ranks} \\
      -m hybridcomp.run train.py --deepspeed_config {config}

finds the newest whole checkpoint, converts it where DeepSpeed has to load a universal one, divides
the batch so that a step has the samples that it had, and writes replan.json, start.sh and for
DeepSpeed ds_config.json. {ranks}, {stages}, {micro_batch}, {accumulation}, {config} and
{checkpoint} are filled in. A script that calls hybridcomp.resume needs no such step.
"""
PLACES = ("ranks", "stages", "micro_batch", "accumulation", "config", "checkpoint")
GENERAL = ("torchrun", "--nproc-per-node", "{ranks}", "-m", "hybridcomp.run", "SCRIPT")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``replan`` to the commands of the command line."""
    parser = commands.add_parser(
        "replan", help="make a checkpoint ready for another number of ranks",
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("checkpoint", type=Path, help="of DeepSpeed, megatron-core or torch.distributed.checkpoint")
    add("--ranks", type=int, required=True, metavar="N", help="that go on")
    add("--stages", type=int, metavar="N", help="of the pipeline (as many as there were)")
    add("--samples", type=int, metavar="N", help="of a step, whole job (as many as there were)")
    add("--micro-batch", type=int, metavar="N", help="samples, at most (as many as there were)")
    add("--lr", choices=batches.Scaling.__args__, help="the learning rate, where samples change")  # type: ignore[attr-defined]
    add("--base", type=Path, metavar="FILE", help="your DeepSpeed file (of the checkpoint)")
    add("--model", metavar="MODEL", help="with --length: plan the layout, as hybridcomp plan does")
    add("--length", type=int, metavar="N", help="tokens of a sequence")
    add("--frozen", type=int, metavar="N", help="with --model: its first blocks train no more")
    add("--cluster", type=Path, metavar="FILE", default=Path("cluster.json"),
        help="what hybridcomp measure wrote (cluster.json)")  # fmt: skip
    add("--out", type=Path, default=Path("replanned"), metavar="FOLDER", help="(replanned)")
    parser.set_defaults(run=run, command=[])


def run(options: argparse.Namespace) -> int:
    """Convert and write; returns the exit status. Raises HybridcompError before it writes."""
    from hybridcomp.patches.ds.checkpoint import conversion

    job, is_deepspeed = saved_job(options.checkpoint)
    base = _settings(options.base, job)
    samples = options.samples or job.samples
    if samples is None:
        todo = "the checkpoint does not say; name the samples of a step of the whole job"
        raise ConfigError("--samples", None, todo)
    factor = batches.lr_factor(job.samples, samples, options.lr)
    stages = _stages(options, job)
    if options.frozen is not None and not options.model:
        raise ConfigError("--frozen", options.frozen, "needed with it: --model and --length")
    plan = _planned(options, job, samples, stages, base) if options.model else None
    if plan is not None:
        stages = plan["stages"]
    replicas = options.ranks // (stages * job.tensor)
    most = options.micro_batch or job.micro or samples
    micro, accumulation = batches.micro_batches(samples, replicas, most)
    if plan is not None:
        micro, accumulation = plan["micro_batch"], plan["accumulation"]
    is_moved = (replicas, stages * job.tensor) != (job.replicas, job.parts)
    converts = is_deepspeed and job.zero > 0 and is_moved
    if not job.zero and stages * job.tensor != job.parts:
        todo = "only ZeRO 1 to 3 resumes on other stages: keep them"
        raise ConfigError("--stages", stages, todo)
    folder = conversion.convert(job) if converts else job.folder
    now = {"ranks": options.ranks, "stages": stages, "tensor": job.tensor,
           "micro_batch": micro, "accumulation": accumulation, "samples": samples}  # fmt: skip
    settings = _ds_config(base, micro, accumulation, converts) if is_deepspeed else None
    _write(options, job, folder, now, settings, {"factor": factor, "scaling": options.lr}, plan)
    before = f"{job.ranks} ranks" if job.ranks else "a job"
    print(f"{folder}, saved by {before} at step {job.step}: {options.ranks} ranks go on, {stages} "
          f"stage(s), {micro} x {accumulation} samples each, {samples} a step")  # fmt: skip
    if factor != 1:
        print(f'note: the checkpoint\'s learning rate is loaded: call hybridcomp.resume(..., lr="'
              f'{options.lr}") in the script, which multiplies it by {factor:g}')  # fmt: skip
    print(f"start it with {options.out / 'start.sh'}")
    return 0


def saved_job(place: Path) -> tuple[SavedJob, bool]:
    """Return the newest complete checkpoint, and whether it is DeepSpeed's. Raises ConfigError."""
    from hybridcomp.patches.ds.checkpoint import replanned as of_deepspeed
    from hybridcomp.patches.mcore import replanned as of_megatron
    from hybridcomp.patches.torch import replanned as of_torch

    wrong = "expected checkpoints of DeepSpeed, megatron-core or of torch.distributed.checkpoint"
    if not place.is_dir():
        raise ConfigError("CHECKPOINT", str(place), f"{wrong}: a folder")
    engines = (of_deepspeed, of_megatron, of_torch)
    of = next((engine for engine in engines if engine.is_here(place)), None)
    if of is None:
        raise ConfigError("CHECKPOINT", str(place), wrong)
    job, skipped = of.find(place)
    for text in skipped:
        print(escaping.printable(f"skipped {text}"))
    if job is None:
        raise ConfigError("CHECKPOINT", str(place), "no checkpoint there was finished")
    return of_torch.with_sampler(job, alone=True) if of is of_torch else job, of is of_deepspeed


def _settings(base: Path | None, job: SavedJob) -> Mapping[str, Any]:
    from hybridcomp.tools.plan.answer.base import base_of

    return job.settings if base is None else base_of(base, "deepspeed")


def _stages(options: argparse.Namespace, job: SavedJob) -> int:
    """Return the number of pipeline stages. Raises ConfigError if it does not fit."""
    stages: int = options.stages or job.parts // job.tensor
    if stages < 1 or (stages > 1 and not job.is_pipeline):
        raise ConfigError("--stages", stages, "expected 1: the model is no PipelineModule")
    if options.ranks < 1 or options.ranks % (stages * job.tensor):
        todo = f"expected a multiple of {stages} stage(s) x {job.tensor} tensor rank(s)"
        raise ConfigError("--ranks", options.ranks, todo)
    return stages


def _planned(
    options: argparse.Namespace, job: SavedJob, samples: int, stages: int, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fastest layout for these ranks, computed without the block's codecs."""
    from hybridcomp.tools.plan.answer.command import infeasible
    from hybridcomp.tools.plan.machines import cluster_file
    from hybridcomp.tools.plan.models.frozen import FrozenModel
    from hybridcomp.tools.plan.models.reading import read_model
    from hybridcomp.tools.plan.request import Batch, SearchLimits
    from hybridcomp.tools.plan.search.budget import AllowedChoices
    from hybridcomp.tools.plan.search.search import search

    if options.length is None:
        raise ConfigError("--length", None, "needed with --model")
    dtype = next((name for name in ("bf16", "fp16") if base.get(name, {}).get("enabled")), "fp32")
    fixed = {"zero_stage": job.zero, "tensor": job.tensor, "stages": stages}
    model = read_model(options.model)
    if options.frozen is not None:
        model = FrozenModel(model, options.frozen)
        if options.stages is None and job.is_pipeline:
            del fixed["stages"]  # on the new ranks, fewer stages may be faster
    limits = SearchLimits(dtype=dtype, fixed=fixed, ranks=options.ranks, keep=1)
    budget = AllowedChoices.parse("recommended")
    batch = Batch(samples, options.length)
    cluster = cluster_file.read(options.cluster)
    found = search(model, cluster, budget, batch, limits)
    if not found.plans:
        raise ConfigError("--ranks", options.ranks, infeasible(found))
    best = found.plans[0]
    print(f"planned: {best.layout}, {best.prediction.seconds:.3g} s a step")
    return {**best.layout.to_json(), "seconds": best.prediction.seconds}


def _ds_config(
    base: Mapping[str, Any], micro: int, accumulation: int, universal: bool
) -> dict[str, Any]:
    """Return ``base`` with the new batch sizes and kind of checkpoint, as a DeepSpeed file."""
    saving = base.get("checkpoint")
    kept = {key: value for key, value in base.items() if key != "train_batch_size"}
    return {
        **kept,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "checkpoint": {**(saving if isinstance(saving, Mapping) else {}),
                       "load_universal": universal},
    }  # fmt: skip


def _write(
    options: argparse.Namespace,
    job: SavedJob,
    folder: Path,
    now: Mapping[str, int],
    settings: Mapping[str, Any] | None,
    lr: Mapping[str, Any],
    plan: Mapping[str, Any] | None,
) -> None:
    """Write replan.json, start.sh and, with ``settings``, ds_config.json."""
    from hybridcomp.tools.compare.launch import fill
    from hybridcomp.tools.plan.answer.start_command import write_script

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    config = (out / "ds_config.json").resolve()
    if settings is not None:
        config.write_text(escaping.json_document(settings), encoding="utf-8")
    before = {"ranks": job.ranks, "stages": job.parts // job.tensor, "tensor": job.tensor,
              "micro_batch": job.micro, "samples": job.samples}  # fmt: skip
    texts = {
        "checkpoint": str(folder.resolve()), "step": job.step, "samples_seen": job.trained,
        "before": before, "now": now, "lr": lr, "plan": plan,
    }  # fmt: skip
    (out / "replan.json").write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")
    values = {**now, "config": config, "checkpoint": folder.resolve()}
    end = ("--deepspeed_config", "{config}") if settings is not None else ()
    command: Sequence[str] = options.command or (*GENERAL, *end)
    words = fill(command, {f"{{{name}}}": str(values[name]) for name in PLACES})
    about = f"# {now['ranks']} ranks, step {job.step}"
    write_script(out / "start.sh", [about, f"exec {escaping.shell_words(words)}"])
