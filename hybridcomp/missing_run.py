"""Say that a job has a block but was started without hybridcomp, so that nothing is compressed.

torch calls ``watch`` at the end of its import, as it does for every package with an entry point in
``torch.backends`` (torch 2.5 and newer; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that off). It
imports nothing and patches nothing: where the environment or the command line names a file that
may hold a block, it asks torch to be called once, behind the first optimizer step of the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hybridcomp.job.environment import CONFIG

#: options with which scripts and the Trainer name the DeepSpeed file
OPTIONS = ("--deepspeed_config", "--deepspeed")
#: what hybridcomp.run, install, attach and publish import, and nothing else does
ACTING = "hybridcomp.patches"


def watch() -> None:
    """Wait for the first optimizer step, where a file is named that may hold a block."""
    if next(_named(_words()), None) is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    looked: list[bool] = []

    def stepped(*_: Any) -> None:
        if looked:  # taking the hook away would change what torch is iterating over
            return
        looked.append(True)
        if sentence := _missing():
            from hybridcomp.log import say

            say(sentence)

    register_optimizer_step_post_hook(stepped)


def _missing() -> str | None:
    """Return what to tell the user of a job of several ranks; None where all is as it should be."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if ACTING in sys.modules or not several:
        return None
    for place, file in _named(_words()):
        if _has_block(file):
            return (
                f"{place} {file} has a block, and nothing is compressed: put -m hybridcomp.run "
                "before the script, or call hybridcomp.install() or hybridcomp.attach(model) in it"
            )
    return None


def _words() -> Sequence[str]:
    """Return the command line; an interpreter inside another program may have none."""
    return getattr(sys, "argv", ())


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the variable or option, and the file that it names."""
    if file := os.environ.get(CONFIG):
        yield f"{CONFIG}:", file
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in OPTIONS and (file := value if equals else following):
            yield option, file


def _has_block(file: str) -> bool:
    """Return whether the file holds a block that is enabled, or one with a mistake."""
    from hybridcomp.config import BLOCK, CompressionConfig, read_source
    from hybridcomp.errors import ConfigError

    try:
        whole = read_source(file)
    except ConfigError:
        return False  # whoever reads the file says what is wrong with it
    if BLOCK not in whole and os.environ.get(CONFIG) != file:
        return False
    try:
        return CompressionConfig.parse(whole.get(BLOCK, whole)).enabled
    except ConfigError:
        return True
