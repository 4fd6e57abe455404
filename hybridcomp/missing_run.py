"""Warn that a job has a block, or a file to record, but was started without hybridcomp.

At the end of its import, torch calls all entry points in ``torch.backends``, also ``watch`` (torch
2.5 and newer; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that off). ``watch`` imports and patches
nothing. If the environment or the command line names a file that may hold a block, or a file for
losses, it registers a torch hook that runs once, after the process's first optimizer step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hybridcomp.job.environment import CONFIG, RECORD
from hybridcomp.job.launcher import start_command

#: options by which scripts and the Trainer name the DeepSpeed file
OPTIONS = ("--deepspeed_config", "--deepspeed")
#: module that only hybridcomp.run and ``install`` import, and the one that has attached models
ARMING, ATTACHED = "hybridcomp.patches.registry", "hybridcomp.patches.torch.steps"
#: module that records losses, and the one that holds a session of megatron-core
RECORDING, PROCESS = "hybridcomp.patches.ds.record", "hybridcomp.session.process"


def watch() -> None:
    """Register the hook if the environment or command line names a file for hybridcomp."""
    if next(_named(_words()), None) is None and not os.environ.get(RECORD):
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    looked: list[bool] = []

    def stepped(*_: Any) -> None:
        if looked:  # removing the hook would change the dictionary that torch is iterating over
            return
        looked.append(True)
        if sentences := list(_missing()):
            from hybridcomp.log import say

            say(*sentences)

    register_optimizer_step_post_hook(stepped)


def _missing() -> Iterator[str]:
    """Yield warnings: in a job of several ranks about an unused block, in any about losses."""
    import torch.distributed as dist

    attached, record, process = map(sys.modules.get, (ATTACHED, RECORDING, PROCESS))
    is_attached = attached is not None and bool(attached.living())
    is_acting = ARMING in sys.modules or is_attached
    has_other = is_attached or (process is not None and process.has_begun())
    is_recorded = record is not None and record.has_recorded()
    if file := os.environ.get(RECORD):
        unwritten = f"WARNING: {RECORD}: nothing is written into {file}, as DeepSpeed engines are"
        if has_other and not is_recorded:
            yield f"{unwritten} recorded, and this one is another"
        elif not is_acting:
            yield (
                f"{unwritten} recorded under hybridcomp alone: start with {start_command()}, or "
                "call hybridcomp.install() before the engine is built"
            )
    if is_acting:
        return
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    for place, file in _named(_words()) if several else ():
        if _has_block(file):
            yield (
                f"WARNING: {place} {file} has a block, and nothing is compressed: start with "
                f"{start_command()}, or call hybridcomp.install() or hybridcomp.attach(model) in "
                "the script"
            )
            return


def _words() -> Sequence[str]:
    """Return the command line; an embedded interpreter may have none."""
    return getattr(sys, "argv", ())


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each variable or option that names a file, and the file."""
    if file := os.environ.get(CONFIG):
        yield f"{CONFIG}:", file
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in OPTIONS and (file := value if equals else following):
            yield option, file


def _has_block(file: str) -> bool:
    """Return whether the file holds an enabled block, or one with a mistake."""
    from hybridcomp.config import BLOCK, CompressionConfig, read_source
    from hybridcomp.errors import ConfigError

    try:
        whole = read_source(file)
    except ConfigError:
        return False  # the reader of the file reports its errors
    if BLOCK not in whole and os.environ.get(CONFIG) != file:
        return False
    try:
        return CompressionConfig.parse(whole.get(BLOCK, whole)).enabled
    except ConfigError:
        return True
