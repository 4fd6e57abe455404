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

from hybridcomp.config.error_messages import Shown
from hybridcomp.elastic import checkpoints
from hybridcomp.elastic.batches import lr_factor
from hybridcomp.elastic.checkpoints import ResumedJob, SavedJob
from hybridcomp.errors import ConfigError
from hybridcomp.job import saved
from hybridcomp.job.parameter_names import plain_name
from hybridcomp.patches.common.resumed_parts import (
    INDEX,
    KEY,
    WHAT,
    check_optimizer,
    check_sampler,
    check_scheduler,
    say_dropped,
    scale,
    whole_index,
)
from hybridcomp.patches.torch.attach import attach
from hybridcomp.patches.torch.state.at_checkpoint import AtCheckpoint

#: keys in a checkpoint for the state of the model, optimizer, hybridcomp, scheduler and sampler
MODEL, OPTIMIZER, OURS, SCHEDULER, SAMPLER = (
    "model", "optimizer", "hybridcomp", "scheduler", "sampler",
)  # fmt: skip
SAVE = (
    'save {"model": ..., "optimizer": ..., "hybridcomp": hybridcomp.stateful(model), "sampler": '
    "sampler} with torch.distributed.checkpoint, see docs/elastic.md"
)


def is_here(place: Path) -> bool:
    """Return whether ``place`` is, or contains, a checkpoint of torch.distributed.checkpoint."""
    return _is_one(place) or any(_is_one(path) for path in place.iterdir() if path.is_dir())


def _is_one(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.distcp"))


def find(place: Path) -> checkpoints.Picked:
    """Return the newest complete checkpoint in ``place``. Raises CheckpointError."""
    return checkpoints.newest_in(place, _is_one, INDEX, read)


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


def check(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise ConfigError if this job cannot resume, before any checkpoint is read."""
    check_optimizer(optimizer, "the model's")


def resume(
    model: Any, job: SavedJob, optimizer: Any, scheduler: Any, sampler: Any, lr: str | None
) -> ResumedJob:
    """See ``hybridcomp.resume``."""
    tops = {name.partition(".")[0] for name in job.files}
    for name, part in ((MODEL, model), (OPTIMIZER, optimizer), (SCHEDULER, scheduler)):
        if part is not None and name not in tops:
            found = Shown(f"{', '.join(sorted(tops))} in {job.folder}, no {name!r}")
            raise ConfigError(KEY, found, SAVE)
    job = with_sampler(job)
    check_sampler(sampler, job)
    factor = lr_factor(job.samples, None if sampler is None else sampler.samples, lr)
    check_scheduler(scheduler, factor, lr)
    with _never_stepped(model, job):
        weights, states = get_state_dict(model, optimizer)
    here = {name: tuple(weight.shape) for name, weight in weights.items()
            if isinstance(weight, torch.Tensor)}  # fmt: skip
    _, problem = saved.attempt(lambda: checkpoints.check_shapes(job.folder, job.shapes, here))
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
        say_dropped(job.folder)
    if scheduler is not None:
        state[SCHEDULER] = scheduler
    load(state, checkpoint_id=job.folder)
    with _never_stepped(model, job):
        set_state_dict(
            model, optimizer, model_state_dict=state[MODEL], optim_state_dict=state[OPTIMIZER]
        )
    scale(optimizer, scheduler, factor)
    # a job that was native when it saved has no state that counts steps
    step = attached.step if attached is not None and OURS in tops else job.step or 0
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
    lacking = [
        parameter
        for name, parameter in inner.named_parameters()
        if parameter.requires_grad and f"{start}{plain_name(name)}" not in stepped
    ]
    for one in lacking if stepped else ():
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in lacking:
            one.requires_grad_(True)


def with_sampler(job: SavedJob, alone: bool = False) -> SavedJob:
    """Return ``job`` with the sampler's state in its checkpoint, if it has one.

    Every rank calls it. ``alone``: whether the caller is a process outside of any job.
    """
    names = [name.partition(".")[2] for name in job.files if name.startswith(f"{SAMPLER}.")]
    if not names:
        return job
    state: dict[str, Any] = {SAMPLER: dict.fromkeys(names, 0)}
    load(state, checkpoint_id=job.folder, no_dist=alone)
    found = state[SAMPLER]
    return replace(job, sampler=found, samples=found.get("samples"), trained=found.get("trained"))
