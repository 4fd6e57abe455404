"""Resume the sampler and the learning rate, and print what is resumed, for every engine."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim.lr_scheduler import LRScheduler

from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.elastic.checkpoints import SavedJob
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.log import say

KEY = "hybridcomp.resume"
WHAT = "resuming a checkpoint"
#: keys of learning rates in an optimizer's group (OneCycleLR, SWALR and Megatron add some), and the
#: attributes of schedulers of torch and Megatron that hold some, their floors included
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
HELD = (
    "base_lrs", "max_lrs", "init_lr", "max_lr", "min_lr", "eta_min", "min_lrs", "default_min_lr",
)  # fmt: skip
#: index file of a checkpoint, which torch writes last
INDEX = ".metadata"


def whole_index(folder: Path) -> Metadata:
    """Read the index of a checkpoint of torch.distributed.checkpoint.

    Raises CheckpointError if it cannot be read, or if a file that it names is too short.
    """
    try:
        index = FileSystemReader(folder).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder} is not whole: {INDEX}: {said[:120]}") from None
    wanted: dict[str, int] = {}
    for one in (index.storage_data or {}).values():
        wanted[one.relative_path] = max(wanted.get(one.relative_path, 0), one.offset + one.length)
    for name, nbytes in wanted.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size < nbytes:
            what = "cut off" if path.is_file() else "missing"
            raise CheckpointError(f"{folder} is not whole: {name} is {what}")
    return index


def check_optimizer(optimizer: Any, whose: str) -> None:
    """Raise ConfigError where the script has given no optimizer."""
    if optimizer is None:
        todo = f"give {whose}: hybridcomp.resume(model, folder, optimizer=optimizer)"
        raise ConfigError(f"{KEY}: optimizer", NOTHING, todo)


def say_dropped(folder: Path) -> None:
    """Print that this job drops the residuals in ``folder``."""
    say(f"WARNING: {folder} is of a compressed run, and this job has no block: what error "
        "feedback held back is dropped")  # fmt: skip


def check_sampler(sampler: Any, job: SavedJob, samples: int | None = None) -> None:
    """Raise ConfigError if ``sampler`` cannot resume; ``samples``: those of a step."""
    if sampler is None:
        return
    if samples not in (None, sampler.samples):
        todo = f"the engine's steps have {samples} samples; give the sampler as many"
        raise ConfigError("ElasticSampler.samples", sampler.samples, todo)
    if job.sampler is None:
        todo = (
            'save sampler.state_dict() with the job: client_state={"sampler": ...} of DeepSpeed, '
            '"sampler" in what torch.distributed.checkpoint saves'
        )
        raise ConfigError(KEY, Shown(f'no state of a sampler, "sampler", in {job.folder}'), todo)
    sampler.check(job.sampler)


def check_scheduler(scheduler: Any, factor: float, lr: str | None) -> None:
    """Raise ConfigError if ``scale`` cannot change the rates of a scheduler.

    It changes those of torch's schedulers, and of Megatron's, which has ``max_lr``.
    """
    is_known = scheduler is None or isinstance(scheduler, LRScheduler)
    if factor != 1 and not is_known and not hasattr(scheduler, "max_lr"):
        todo = 'make it with the new rates, and say lr="keep"'
        raise ConfigError(f"{KEY}: lr", Shown(f"{lr} with {type(scheduler).__name__}"), todo)


def scale(optimizer: Any, scheduler: Any, factor: float) -> None:
    """Multiply the loaded learning rates by ``factor``, and those that a scheduler starts from."""
    if factor == 1:
        return
    for group in optimizer.param_groups:
        for name in RATES:
            if group.get(name) is not None:
                group[name] = group[name] * factor
    _scale_scheduler(scheduler, factor)


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for name in HELD:
        held = getattr(scheduler, name, None)
        if held is not None:
            many = isinstance(held, (list, tuple))
            setattr(scheduler, name, [one * factor for one in held] if many else held * factor)
    for one in getattr(scheduler, "_schedulers", ()):  # SequentialLR, ChainedScheduler
        _scale_scheduler(one, factor)
