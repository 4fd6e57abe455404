"""Resume from a megatron.core.dist_checkpointing checkpoint on another data-parallel size.

Megatron itself reshards weights and the states of its optimizers. hybridcomp's files lie in the
same folder, and the sum of residuals over the data-parallel ranks is kept. Names of residuals
contain the coordinates of tensor, pipeline and expert ranks, so the numbers of these ranks must not
change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.channels.checkpoint import save_load as checkpoint
from hybridcomp.config.error_messages import Shown
from hybridcomp.elastic import checkpoints
from hybridcomp.elastic.batches import lr_factor
from hybridcomp.elastic.checkpoints import ResumedJob, SavedJob
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import saved
from hybridcomp.patches.common.resumed_parts import (
    KEY,
    WHAT,
    check_optimizer,
    check_sampler,
    check_scheduler,
    say_dropped,
    scale,
    whole_index,
)
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession

#: the files of a checkpoint that Megatron writes first and last, respectively
COMMON, LAST = "common.pt", "metadata.json"
#: how Megatron names the layout of the distributed optimizer's states, in metadata and checkpoints
SHARDING, SAVED_SHARDING = "distrib_optim_sharding_type", "param_state_sharding_type"
#: layouts that another number of data-parallel ranks can load
RESHARDABLE = ("fully_reshardable", "dp_reshardable")
SAVE = (
    'save {"model": ..., "optimizer": ..., "sampler": sampler.state_dict(), "iteration": step} '
    "with megatron.core.dist_checkpointing, and hybridcomp.save_state into the same folder, see "
    "docs/elastic.md"
)


def is_here(place: Path) -> bool:
    """Return whether ``place`` is a checkpoint of Megatron, or a folder that contains one."""
    return any(map(_is_one, (place, *place.iterdir())))


def _is_one(folder: Path) -> bool:
    return (folder / COMMON).is_file()


def find(place: Path) -> checkpoints.Picked:
    """Return the newest complete checkpoint in ``place``. Raises CheckpointError."""
    return checkpoints.newest_in(place, _is_one, LAST, read)


def read(folder: Path) -> SavedJob:
    """Read a checkpoint's description. Raises CheckpointError if the checkpoint is incomplete."""
    from megatron.core import dist_checkpointing

    known = whole_index(folder).state_dict_metadata
    number = checkpoints.number_of(folder)
    common: Mapping[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    note = checkpoint_note.read(folder)
    if note is not None and (lacking := checkpoint_note.missing(folder, note)):
        raise CheckpointError(f"{folder} is not whole: {lacking[0]} is missing")
    state = checkpoint.state_in(folder)
    groups = {} if state is None else state["groups"]
    tensor, stages = (int(groups.get(name, 1)) for name in ("tp", "pp"))
    sampler = common.get("sampler")
    sampler = sampler if isinstance(sampler, dict) else {}
    settings = {
        "sharding": _sharding(common.get("optimizer")), "groups": None if state is None else groups,
        "metadata": common.get("content_metadata") or {},
    }  # fmt: skip
    return SavedJob(
        folder, common.get("iteration", number if number >= 0 else None),
        None if note is None else note["world_size"] // (tensor * stages), tensor * stages, tensor,
        is_pipeline=stages > 1, samples=sampler.get("samples"), trained=sampler.get("trained"),
        sampler=sampler or None, settings=settings, files=(*known, *common),
    )  # fmt: skip


def check(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise ConfigError if this job cannot resume, before any checkpoint is read."""
    check_optimizer(optimizer, "Megatron's")


def resume(
    model: Any, job: SavedJob, optimizer: Any, scheduler: Any, sampler: Any, lr: str | None
) -> ResumedJob:
    """See ``hybridcomp.resume``."""
    chunks = [_unwrapped(one) for one in (model if isinstance(model, (list, tuple)) else [model])]
    session = process.own_session()
    if session is not None:
        _check_layout(session, job)
    elif job.settings["groups"] is not None:
        say_dropped(job.folder)
    check_sampler(sampler, job)
    factor = lr_factor(job.samples, None if sampler is None else sampler.samples, lr)
    check_scheduler(scheduler, factor, lr)
    name = next((n for n in ("scheduler", "opt_param_scheduler") if n in job.files), "")
    if scheduler is not None and not name:
        raise ConfigError(f"{KEY}: scheduler", Shown(f"none in {job.folder}"), SAVE)
    wanted = _sharded(chunks, optimizer, job)
    _, problem = saved.attempt(lambda: _check_model(job, wanted))
    saved.all_well(problem, WHAT)
    found = _load(job, chunks, optimizer, wanted)
    if scheduler is not None:
        scheduler.load_state_dict(found[name])
    if session is not None:
        process.load_state(job.folder)
    scale(optimizer, scheduler, factor)
    if sampler is not None:
        sampler.load_state_dict(job.sampler)
    step = job.step if sampler is None else sampler.steps
    return ResumedJob(job.folder, step or 0, job.trained, job.ranks, factor)


def _unwrapped(chunk: Any) -> Any:
    """Return the model below Megatron's wrappers, as its training script saves it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _check_layout(session: EngineSession, job: SavedJob) -> None:
    """Raise ConfigError for a job whose state cannot be carried over to these ranks."""
    then, now = job.settings["groups"], dict(session.layout())
    if then is not None and then != now:
        said = Shown(f"{job.folder} of {_listed(then)}")
        todo = f"this job has {_listed(now)}: only the number of replicas may change"
        raise ConfigError(KEY, said, todo)
    if session.channels.config.sync.acts and job.ranks not in (None, dist.get_world_size()):
        said = Shown(f"{job.folder} of {job.ranks} ranks")
        raise ConfigError(KEY, said, "islands of sync keep their ranks: resume on as many")


def _listed(groups: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in groups.items())


def _sharding(optimizer: Any) -> str | None:
    """Return the layout of the distributed optimizer's states; None without such an optimizer."""
    if not isinstance(optimizer, Mapping):
        return None
    found = optimizer.get(SAVED_SHARDING)
    inner = (_sharding(one) for one in optimizer.values() if isinstance(one, Mapping))
    return found if isinstance(found, str) else next(filter(None, inner), None)


def _sharded(chunks: Sequence[Any], optimizer: Any, job: SavedJob) -> dict[str, Any]:
    """Return the state that Megatron loads: the chunks, and their optimizer in the saved layout."""
    kind = job.settings["sharding"]
    if kind is not None and kind not in RESHARDABLE:
        todo = f'expected {SHARDING} "{RESHARDABLE[0]}" in the metadata of what saved it'
        raise ConfigError(KEY, Shown(f"optimizer states of {kind!r}"), todo)
    metadata = dict(job.settings["metadata"])
    if kind is not None:
        metadata[SHARDING] = kind
    names = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    found: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, chunks, strict=True)
    }
    weights = found if len(chunks) > 1 else found["model"]
    return found | {
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
    }


def _check_model(job: SavedJob, wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint's weights are not those of this model."""
    from megatron.core.dist_checkpointing import ShardedTensor, load_tensors_metadata

    parts = [one for name, part in wanted.items() if name != "optimizer" for one in part.values()]
    here = {one.key: tuple(one.global_shape) for one in parts if isinstance(one, ShardedTensor)}
    there = {key: tuple(one.global_shape) for key, one in
             load_tensors_metadata(str(job.folder)).items() if key in here}  # fmt: skip
    checkpoints.check_shapes(job.folder, there, here)


def _load(
    job: SavedJob, chunks: Sequence[Any], optimizer: Any, wanted: dict[str, Any]
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    names = [name for name in wanted if name != "optimizer"]
    found: dict[str, Any] = dist_checkpointing.load(wanted, str(job.folder))
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(found[name])
    with torch.no_grad():  # upstream lacks it for dp_reshardable
        optimizer.load_state_dict(found["optimizer"])
    return found
