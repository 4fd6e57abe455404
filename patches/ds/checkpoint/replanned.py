"""Read DeepSpeed's checkpoints offline, and resume on other numbers of ranks or stages.

Without ZeRO DeepSpeed loads its checkpoints on any number of replicas. At stages 1 to 3, and on
another number of pipeline stages, it loads the output of its own ``ds_to_universal``.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hybridcomp.channels import channels_of
from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.config.error_messages import Shown
from hybridcomp.elastic import checkpoints
from hybridcomp.elastic.batches import lr_factor
from hybridcomp.elastic.checkpoints import ResumedJob, SavedJob
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import saved
from hybridcomp.patches.common.first_rank import on_first
from hybridcomp.patches.common.resumed_parts import KEY, WHAT, check_sampler, scale
from hybridcomp.patches.ds.checkpoint import conversion

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
LAYER = re.compile(r"layer_\d+-model(?:_(\d+)-model)?_states\.pt")


def is_here(place: Path) -> bool:
    """Return whether ``place`` is a DeepSpeed checkpoint, or a folder of checkpoints."""
    return bool(_tags(place)) or _is_tag(place)


def _is_tag(folder: Path) -> bool:
    found = any(MODEL.fullmatch(path.name) for path in folder.glob("*_model_states.pt"))
    return found and not (folder / "zero").is_dir()  # otherwise it is a universal checkpoint


def _tags(place: Path) -> list[Path]:
    inside = place.iterdir() if place.is_dir() else ()  # nothing exists at a job's first start
    return [path for path in inside if path.is_dir() and _is_tag(path)]


def find(place: Path) -> checkpoints.Picked:
    """Return the newest complete checkpoint in ``place``, which may itself be one.

    DeepSpeed writes its file ``latest`` once a checkpoint is complete, so newer ones than that are
    skipped. Raises CheckpointError if there are finished checkpoints but none is complete.
    """
    if _is_tag(place):
        return checkpoints.newest([place], read)
    latest = place / checkpoint_note.LATEST
    name = latest.read_text(errors="backslashreplace").strip() if latest.is_file() else None
    tags = sorted(_tags(place), key=checkpoints.number_of, reverse=True)
    last = place / name if name else None
    limit = checkpoints.number_of(last) if last else -1
    later = [tag for tag in tags if tag != last and checkpoints.number_of(tag) >= limit]
    older = [tag for tag in tags if tag != last and tag not in later]
    job, skipped = checkpoints.newest([last, *older] if last else [], read)
    names = f"{latest} names {name}" if name else f"there is no {latest}"
    return job, [f"{tag} was not finished: {names}" for tag in later] + skipped


def read(tag: Path) -> SavedJob:
    """Read a checkpoint's description. Raises CheckpointError if the checkpoint is incomplete."""
    names = sorted(path.name for path in tag.glob("*_states.pt"))
    model = [name for name in names if MODEL.fullmatch(name)]
    if not model:
        raise CheckpointError(f"{tag} is not whole: it has no file of model states")
    first = _states(tag / model[0])
    replicas, parts = (_count(tag, first, key) for key in ("dp_world_size", "mp_world_size"))
    is_partitioned = model[0].startswith("zero_")
    layers = {name: found[1] for name in names if (found := LAYER.fullmatch(name))}
    settings = first.get("ds_config")
    settings = settings if isinstance(settings, dict) else {}
    sections = settings.get("zero_optimization")
    stage = sections.get("stage") if isinstance(sections, dict) else None
    known = [name for name in names if OPTIMIZER.fullmatch(name)]
    zero = 3 if is_partitioned else stage if stage in (1, 2) else 1 if known else 0
    files = _wanted(replicas, parts, zero, any(name.startswith("bf16_") for name in known))
    for name in (*files, *layers):
        if not zipfile.is_zipfile(tag / name):
            what = "cut off" if (tag / name).exists() else "missing"
            raise CheckpointError(f"{tag} is not whole: {name} is {what}")
    note = checkpoint_note.read(tag)
    if note is not None and (lacking := checkpoint_note.missing(tag, note)):
        raise CheckpointError(f"{tag} is not whole: {lacking[0]} is missing")
    parted = [name for name in files if MODEL.fullmatch(name)]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in parted[:1] if is_partitioned else parted:
        shapes |= _shapes(first if name == model[0] else _states(tag / name))
    sampler = first.get("sampler")
    sampler = sampler if isinstance(sampler, dict) else None
    return SavedJob(
        tag, first.get("global_steps"), replicas, parts,
        len(set(layers.values())) or parts,
        zero, bool(layers), _samples(first, settings, replicas, sampler),
        _number(settings.get("train_micro_batch_size_per_gpu")), first.get("global_samples"),
        sampler, settings, shapes, (*files, *layers),
    )  # fmt: skip


def _wanted(replicas: int, parts: int, zero: int, is_bf16: bool) -> list[str]:
    """Return the names of the files that a job of this layout writes."""
    found = []
    for part in range(parts):
        ranks = [f"zero_pp_rank_{rank}_mp_rank_{part:02d}" for rank in range(replicas)]
        models = ranks if zero == 3 else [f"mp_rank_{part:02d}"]
        found += [f"{name}_model_states.pt" for name in models]
        bf16 = "bf16_" if is_bf16 else ""
        found += [f"{bf16}{name}_optim_states.pt" for name in ranks if zero]
    return found


def _states(path: Path) -> dict[str, Any]:
    """Read a file without executing anything in it, and without its tensors' values."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        todo = "it holds objects that only a program could make; save plain types as client_state"
        said = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {todo} ({said[:120]})") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path.parent} is not whole: {path.name}: {said[:120]}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.parent} is not whole: {path.name} holds no states")
    return found


def _count(tag: Path, states: Mapping[str, Any], key: str) -> int:
    found = _number(states.get(key))
    if not found or found > checkpoint_note.MOST_RANKS:
        raise CheckpointError(f"{tag} is not whole: {key} is {states.get(key)!r}")
    return found


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = states.get("param_shapes")
    found = {name: shape for group in groups or () for name, shape in group.items()}
    found |= states.get("frozen_param_shapes") or {}
    if groups is None and isinstance(states.get("module"), dict):
        found = {name: value.shape for name, value in states["module"].items()
                 if isinstance(value, torch.Tensor)}  # fmt: skip
    return {name: tuple(shape) for name, shape in found.items()}


def _samples(
    states: Mapping[str, Any],
    settings: Mapping[str, Any],
    replicas: int,
    sampler: Mapping[str, Any] | None,
) -> int | None:
    """Return the samples per step of the job that saved ``states``."""
    if sampler is not None:
        return _number(sampler.get("samples"))
    if whole := _number(settings.get("train_batch_size")):
        return whole
    micro = _number(settings.get("train_micro_batch_size_per_gpu"))
    if micro:
        return micro * (_number(settings.get("gradient_accumulation_steps")) or 1) * replicas
    steps, samples = states.get("global_steps"), states.get("global_samples")
    return samples // steps if steps and samples and samples % steps == 0 else None


def check(engine: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise ConfigError for engines that cannot resume, before any checkpoint is read."""
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if given is not None:
            raise ConfigError(f"{KEY}: {name}", Shown("one"), "the engine has it; leave it out")
    if type(engine.optimizer).__name__ == "BF16_Optimizer" and not engine.zero_optimization():
        # DeepSpeed takes the states of one rank for those of all ranks
        todo = "DeepSpeed cannot load what it saves of one; take ZeRO 1, whose it can"
        raise ConfigError(KEY, Shown("a pipeline in bf16 without ZeRO"), todo)


def resume(
    engine: Any, job: SavedJob, optimizer: Any, scheduler: Any, sampler: Any, lr: str | None
) -> ResumedJob:
    """See ``hybridcomp.resume``."""
    replicas, parts = int(engine.seq_dp_world_size), int(engine.mp_world_size)
    is_moved = (replicas, parts) != (job.replicas, job.parts)
    _check_layout(engine, job, parts, is_moved)
    factor = lr_factor(job.samples, int(engine.train_batch_size()), lr)
    scheduler = engine.lr_scheduler
    if factor != 1 and scheduler is not None and not isinstance(scheduler, LRScheduler):
        todo = 'write the new rates into the DeepSpeed file, and say lr="keep"'
        raise ConfigError(f"{KEY}: lr", Shown(f"{lr} with {type(scheduler).__name__}"), todo)
    check_sampler(sampler, job, int(engine.train_batch_size()))
    _, problem = saved.attempt(lambda: _check_model(engine, job))
    saved.all_well(problem, WHAT)
    folder, converts = job.folder, is_moved and job.zero > 0
    if converts:
        folder = Path(on_first(lambda beat: str(conversion.convert(job, beat)), conversion.WHAT))
    with _loading(engine, universal=converts):
        loaded, state = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if loaded is None:
        raise CheckpointError(f"{folder}: DeepSpeed found nothing to load")
    scale(engine.optimizer, scheduler, factor)
    if sampler is not None:
        sampler.load_state_dict(job.sampler)
    return ResumedJob(
        job.folder, int(engine.global_steps), int(engine.global_samples), job.ranks, factor, state
    )


def _check_layout(engine: Any, job: SavedJob, parts: int, is_moved: bool) -> None:
    """Refuse layouts that DeepSpeed cannot load on these ranks. Raises ConfigError."""
    from deepspeed.pipe import PipelineModule

    is_pipeline, stage = isinstance(engine.module, PipelineModule), engine.zero_optimization_stage()
    stages = engine.module.num_stages if is_pipeline else 1
    said = Shown(f"{job.folder} of {job.replicas} replicas of {job.parts} ranks")
    if is_pipeline != job.is_pipeline:
        todo = "a PipelineModule is resumed by a PipelineModule, with one stage or more"
        raise ConfigError(KEY, said, todo)
    if stage != job.zero and {stage, job.zero} != {1, 2}:
        raise ConfigError(KEY, Shown(f"ZeRO {stage}"), f"expected ZeRO {job.zero}, which saved it")
    if not is_moved:
        return
    channels = channels_of(engine)
    if channels is not None and channels.config.sync.acts:
        raise ConfigError(KEY, said, "islands of sync keep their ranks: resume on as many")
    if any(job.folder.glob("layer_*_expert_*")):
        raise ConfigError(KEY, said, "the files of experts need as many ranks as saved them")
    if parts // stages != job.tensor:
        raise ConfigError(KEY, said, f"expected {job.tensor} tensor rank(s), as saved it")
    if parts != job.parts and not job.zero:
        todo = "without ZeRO DeepSpeed saves the optimizer by stage: keep the stages, or save at 1"
        raise ConfigError(KEY, said, todo)


def _check_model(engine: Any, job: SavedJob) -> None:
    """Raise CheckpointError if this rank's parameters differ from the checkpoint's."""
    here = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
        # ZeRO 1 states no shapes of frozen parameters, which DeepSpeed itself compares
        if parameter.requires_grad or name in job.shapes
    }
    is_whole = not job.is_pipeline and job.zero
    there = {name: shape for name, shape in job.shapes.items() if is_whole or name in here}
    if job.shapes:  # in a pipeline without ZeRO DeepSpeed itself compares the layers
        checkpoints.check_shapes(job.folder, there, here)


@contextlib.contextmanager
def _loading(engine: Any, universal: bool) -> Iterator[None]:
    """Make DeepSpeed load a universal checkpoint, or not, whatever its file says."""
    config = engine._config
    before = config.load_universal_checkpoint
    config.load_universal_checkpoint = universal
    try:
        yield
    finally:
        config.load_universal_checkpoint = before
