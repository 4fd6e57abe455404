"""Describe the job that saved a checkpoint, and pick the newest complete checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.errors import CheckpointError


@dataclass(frozen=True)
class SavedJob:
    """The job that saved a checkpoint, as the checkpoint's files describe it.

    An attribute is None if the files do not contain it.

    Attributes:
        folder: the checkpoint's folder.
        step: number of optimizer steps.
        replicas: number of data-parallel ranks.
        parts: ranks per replica: pipeline stages x tensor ranks.
        tensor: number of tensor ranks.
        zero: stage of DeepSpeed's ZeRO.
        is_pipeline: whether the model is DeepSpeed's PipelineModule.
        samples, micro: samples of a step of the whole job, and of a micro-batch.
        trained: samples of all steps.
        sampler: state of an ElasticSampler.
        settings: the job's DeepSpeed configuration.
        shapes: shapes of the parameters, by name.
        files: names of this checkpoint's files; an earlier save may have left others.
    """

    folder: Path
    step: int | None = None
    replicas: int | None = None
    parts: int = 1
    tensor: int = 1
    zero: int = 0
    is_pipeline: bool = False
    samples: int | None = None
    micro: int | None = None
    trained: int | None = None
    sampler: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def ranks(self) -> int | None:
        """Return the number of ranks."""
        return None if self.replicas is None else self.replicas * self.parts


@dataclass(frozen=True)
class ResumedJob:
    """The checkpoint and the step from which a job continues.

    Attributes:
        folder: folder of the loaded checkpoint; None: there was none, the job begins.
        step: optimizer steps so far.
        samples_seen: samples of all steps so far; None: the checkpoint does not say.
        ranks: ranks of the job that saved the checkpoint; None: the checkpoint does not say.
        lr_factor: factor by which the learning rate was multiplied.
        client_state: DeepSpeed's ``client_state`` of the checkpoint.
    """

    folder: Path | None = None
    step: int = 0
    samples_seen: int | None = 0
    ranks: int | None = None
    lr_factor: float = 1.0
    client_state: Mapping[str, Any] = field(default_factory=dict)


#: a checkpoint or None, and the reasons why newer ones were skipped
Picked = tuple[SavedJob | None, list[str]]


def number_of(folder: Path) -> int:
    """Return the number at the end of a folder's name, -1 without one."""
    found = re.search(r"(\d+)$", folder.name)
    return int(found[1]) if found else -1


def newest_in(
    place: Path, is_one: Callable[[Path], bool], last: str, read: Callable[[Path], SavedJob]
) -> Picked:
    """Return the newest complete checkpoint in ``place``, which may itself be a checkpoint.

    A checkpoint is newer if the number at the end of its folder's name is larger, and complete if
    it has the file ``last``, which an engine writes at the end. Raises CheckpointError like
    ``newest``.
    """
    if is_one(place):
        return newest([place], read)
    inside = place.iterdir() if place.is_dir() else ()  # nothing exists at a job's first start
    found = [path for path in inside if path.is_dir() and is_one(path)]
    found.sort(key=lambda path: (number_of(path), path.name), reverse=True)
    done = [path for path in found if (path / last).is_file()]
    job, skipped = newest(done, read)
    return job, [f"{path} was not finished: it has no {last}" for path in found
                 if path not in done] + skipped  # fmt: skip


def check_shapes(
    folder: Path, there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError if a checkpoint's shapes ``there`` differ from the model's ``here``."""
    wrong = [name for name in {*there, *here} if there.get(name) != here.get(name)]
    if wrong:
        name = min(wrong)
        raise CheckpointError(
            f"{folder} is of another model: {name} is {there.get(name, 'missing')} there and "
            f"{here.get(name, 'missing')} here; nothing was loaded"
        )


def newest(folders: Iterable[Path], read: Callable[[Path], SavedJob]) -> Picked:
    """Return the first complete checkpoint of ``folders``, and why those before it were skipped.

    Raises CheckpointError if there are checkpoints but none is complete.
    """
    skipped: list[str] = []
    for folder in folders:
        try:
            return read(folder), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        todo = "restore one, or name an empty folder to begin anew"
        raise CheckpointError(f"no whole checkpoint: {'; '.join(skipped)}; {todo}")
    return None, []
