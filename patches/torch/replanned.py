"""Resume from a checkpoint of torch.distributed.checkpoint on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_map

from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.elastic import checkpoints
from hybridcomp.elastic.batches import lr_factor
from hybridcomp.elastic.checkpoints import ResumedJob, SavedJob
from hybridcomp.elastic.freezing import plain
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import saved
from hybridcomp.log import say
from hybridcomp.patches.common.first_rank import on_first
from hybridcomp.patches.common.resumed_parts import (
    INDEX,
    KEY,
    WHAT,
    check_sampler,
    say_skipped,
    scale,
    whole_index,
)
from hybridcomp.patches.torch.at_checkpoint import AtCheckpoint
from hybridcomp.patches.torch.attach import attach

#: how a checkpoint names the state of a model, an optimizer, hybridcomp, a scheduler, a sampler
MODEL, OPTIMIZER, OURS, SCHEDULER, SAMPLER = (
    "model", "optimizer", "hybridcomp", "scheduler", "sampler",
)  # fmt: skip
SAVE = (
    'save {"model": ..., "optimizer": ..., "hybridcomp": hybridcomp.stateful(model), "sampler": '
    "sampler} with torch.distributed.checkpoint, see docs/elastic.md"
)


def is_here(place: Path) -> bool:
    """Return whether ``place`` is a checkpoint of torch.distributed.checkpoint, or holds some."""
    return _is_one(place) or any(_is_one(path) for path in place.iterdir() if path.is_dir())


def _is_one(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.distcp"))


def find(place: Path) -> checkpoints.Picked:
    """Return the newest whole checkpoint in ``place``, which may be one itself.

    Its folder has the largest number at the end of its name. torch writes its index last, so a
    checkpoint without an index is unfinished. Raises CheckpointError if none is whole.
    """
    if _is_one(place):
        return checkpoints.newest([place], read)
    # the folder does not exist at a job's first start
    inside = place.iterdir() if place.is_dir() else ()
    found = [path for path in inside if path.is_dir() and _is_one(path)]
    found.sort(key=lambda path: (checkpoints.number_of(path), path.name), reverse=True)
    done = [path for path in found if (path / INDEX).is_file()]
    job, skipped = checkpoints.newest(done, read)
    return job, [f"{path} was not finished: it has no {INDEX}" for path in found
                 if path not in done] + skipped  # fmt: skip


def read(folder: Path) -> SavedJob:
    """Read a checkpoint's description. Raises CheckpointError if the checkpoint is incomplete."""
    index = whole_index(folder)
    known = index.state_dict_metadata
    ranks = sum(name.startswith(f"{OURS}.rank_") for name in known)
    shapes = {
        name.partition(".")[2]: tuple(one.size) for name, one in known.items()
        if name.startswith(f"{MODEL}.") and isinstance(one, TensorStorageMetadata)
    }  # fmt: skip
    number = checkpoints.number_of(folder)
    step = number if number >= 0 else None
    return SavedJob(folder, step, replicas=ranks or None, shapes=shapes, files=tuple(known))


def resume(
    model: Any, place: Path, optimizer: Any, scheduler: Any, sampler: Any, lr: str | None
) -> ResumedJob:
    """See ``hybridcomp.resume``."""
    if optimizer is None:
        todo = "give the model's: hybridcomp.resume(model, folder, optimizer=optimizer)"
        raise ConfigError(f"{KEY}: optimizer", NOTHING, todo)
    job, skipped = on_first(lambda beat: find(place), WHAT)
    say_skipped(skipped)
    if job is None:
        return ResumedJob()
    tops = {name.partition(".")[0] for name in job.files}
    for name, part in ((MODEL, model), (OPTIMIZER, optimizer), (SCHEDULER, scheduler)):
        if part is not None and name not in tops:
            found = Shown(f"{', '.join(sorted(tops))} in {job.folder}, no {name!r}")
            raise ConfigError(KEY, found, SAVE)
    job = with_sampler(job)
    check_sampler(sampler, job)
    factor = lr_factor(job.samples, None if sampler is None else sampler.samples, lr)
    with _never_stepped(model, job):
        weights, states = get_state_dict(model, optimizer)
    _, problem = saved.attempt(lambda: _check_model(job, weights))
    saved.all_well(problem, WHAT)
    # read into copies: an error midway leaves the model as it was
    state: dict[str, Any] = tree_map(
        lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else one,
        {MODEL: weights, OPTIMIZER: states},
    )
    attached = attach(model)
    if attached is not None:
        state[OURS] = AtCheckpoint(attached, job.folder)
    elif OURS in tops:
        say(f"WARNING: {job.folder} is of a compressed run, and this job has no block: what error "
            "feedback held back is dropped")  # fmt: skip
    if scheduler is not None:
        state[SCHEDULER] = scheduler
    load(state, checkpoint_id=job.folder)
    with _never_stepped(model, job):
        set_state_dict(
            model, optimizer, model_state_dict=state[MODEL], optim_state_dict=state[OPTIMIZER]
        )
    scale(optimizer, scheduler, factor)
    step = job.step or 0 if attached is None else attached.step
    if sampler is not None:
        sampler.load_state_dict(job.sampler)
        step = sampler.steps
    return ResumedJob(job.folder, step, job.trained, job.ranks, factor)


@contextmanager
def _never_stepped(model: Any, job: SavedJob) -> Iterator[None]:
    """Make torch leave out optimizer states of frozen parameters, which the checkpoint lacks.

    torch otherwise expects a state for every parameter that requires gradients.
    """
    start = f"{OPTIMIZER}.state."
    stepped = {name.rpartition(".")[0] for name in job.files if name.startswith(start)}
    inner = getattr(model, "module", model)
    lacking = [one for name, one in inner.named_parameters()
               if one.requires_grad and f"{start}{plain(name)}" not in stepped]  # fmt: skip
    for one in lacking if stepped else ():
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in lacking:
            one.requires_grad_(True)


def with_sampler(job: SavedJob, alone: bool = False) -> SavedJob:
    """Return ``job`` with the sampler's state in its checkpoint, if it has one.

    Every rank calls it; ``alone``: a process that is no rank of a job calls it.
    """
    names = [name.partition(".")[2] for name in job.files if name.startswith(f"{SAMPLER}.")]
    if not names:
        return job
    state: dict[str, Any] = {SAMPLER: dict.fromkeys(names, 0)}
    load(state, checkpoint_id=job.folder, no_dist=alone)
    found = state[SAMPLER]
    return replace(job, sampler=found, samples=found.get("samples"), trained=found.get("trained"))


def _check_model(job: SavedJob, weights: dict[str, Any]) -> None:
    """Raise CheckpointError where the checkpoint has other parameters."""
    here = {name: tuple(one.shape) for name, one in weights.items()
            if isinstance(one, torch.Tensor)}  # fmt: skip
    for name in sorted({*here, *job.shapes}):
        if here.get(name) != job.shapes.get(name):
            raise CheckpointError(
                f"{job.folder} is of another model: {name} is "
                f"{job.shapes.get(name, 'not there')} there and {here.get(name, 'not there')} "
                "here; nothing was loaded"
            )
