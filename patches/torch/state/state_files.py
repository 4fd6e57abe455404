"""Write and read the files of ``hybridcomp.save_state``: one for each rank and attached model.

Files are named after the model (``identity``), and a model loads the file with its name, whatever
other models the saving or loading job has. State that may belong to another model is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp.channels.checkpoint.resharing import share
from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved
from hybridcomp.job.saved_together import files_together
from hybridcomp.log import say_once as say
from hybridcomp.patches.torch.state import claimed_saves
from hybridcomp.patches.torch.state.identity import names_of
from hybridcomp.patches.torch.state.stateful import (
    WithState,
    checked,
    entry,
    or_nothing,
    resume_followers,
    state_dict_of,
    take_over,
)
from hybridcomp.session import process

#: file name; ``model``: a name from ``identity.names_of``
FILE = "hybridcomp_model_{model}_rank_{rank:05d}.pt"


def save(folder: Path, models: Sequence[WithState], loss_scale: float | None = None) -> None:
    """Save ``models``, and the process's session if it has begun or there are no models."""
    if models:
        save_files(folder, models, loss_scale)
    if not models or process.has_begun():
        process.save_state(folder, loss_scale)


def load(folder: Path, models: Sequence[WithState], loss_scale: float | None = None) -> None:
    """Load what ``save`` wrote."""
    if models:
        load_files(folder, models, loss_scale)
    if not models or process.has_begun():
        process.load_state(folder, loss_scale)


def save_files(folder: Path, every: Iterable[WithState], loss_scale: float | None = None) -> None:
    """Write one file for each rank and model into ``folder``; every rank calls it.

    ``loss_scale``: the factor on the gradients; None: that of each model's GradScaler.

    Every file is written completely or not at all. Raises CheckpointError, on every rank, if a rank
    could not write its file, or if another island's job has written into the folder.
    """
    models = list(every)
    with files_together("saving the state of hybridcomp"):
        claimed_saves.claim(folder, models)
        for name, attached in zip(names_of(models), models, strict=True):
            path = folder / FILE.format(model=name, rank=dist.get_rank())
            saved.write(path, state_dict_of(attached, loss_scale))


def load_files(folder: Path, every: Iterable[WithState], loss_scale: float | None = None) -> None:
    """Load the files of ``save_files``; every rank calls it. ``loss_scale``: as for ``load``.

    Raises CheckpointError, on every rank and with nothing loaded, if a file is damaged, a rank's
    file is missing, or the folder holds the state of other models.
    """
    models = list(every)
    with or_nothing(models):
        names = names_of(models)
        _check_models(folder, names)
        pairs = zip(names, models, strict=True)
        found = [_read(folder, name, attached) for name, attached in pairs]
        read = zip(models, found, strict=True)
        taken = [take_over(attached, states, loss_scale) for attached, states in read]
    for attached, states in zip(models, taken, strict=True):
        resume_followers(attached, states)


def _check_models(folder: Path, names: Sequence[str]) -> None:
    """Raise CheckpointError if the state in ``folder`` cannot be matched to the models."""
    here = Counter(name.partition("_")[0] for name in names)
    start = FILE.partition("{")[0]
    stored = {path.name.removeprefix(start).rpartition("_rank_")[0] for path in _files(folder, "*")}
    there = Counter(name.partition("_")[0] for name in stored)
    missing, left = set(here) - set(there), set(there) - set(here)
    if missing and left:
        raise CheckpointError(
            f"{folder} holds the state of another model ({_shown(left)}), none of this one "
            f"({_shown(missing)}): names or shapes of parameters differ; load it into the model "
            "that saved it, or leave load_state out and begin with residuals of zero"
        )
    for identity in set(here) & set(there):
        if here[identity] != there[identity]:
            raise CheckpointError(
                f"{folder} holds the state of {there[identity]} models with the parameters of "
                f"{identity}, this process has attached {here[identity]} of them: which is which "
                "cannot be told; attach as many as there were, in the same order"
            )
    if left:
        say(f"{folder} also holds the state of {_shown(left)}, which is not attached: left there")


def _shown(identities: Iterable[str]) -> str:
    return ", ".join(sorted(identities))


def _files(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(FILE.format(model=name, rank=0).replace("rank_00000", "rank_*")))


def _read(folder: Path, name: str, attached: WithState) -> dict[str, dict[str, Any]]:
    """Read the states that this rank loads, by entry; raises CheckpointError."""
    paths = _files(folder, name)
    if not paths:
        return {}
    first = saved.read(paths[0])
    saved.expect(paths[0], first, "world_size", lambda size: saved.is_count(size) and size > 0)
    old = first["world_size"]
    wanted = {rank: folder / FILE.format(model=name, rank=rank) for rank in share(old)}
    missing = [path.name for path in wanted.values() if not path.is_file()]
    if missing:
        raise CheckpointError(f"{folder}: expected files of {old} ranks, found no {missing[0]}")
    return {
        entry(rank): checked(path, saved.read(path), attached, entry(rank))
        for rank, path in wanted.items()
    }
