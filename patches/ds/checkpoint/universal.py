"""Carry hybridcomp's files over to DeepSpeed's universal checkpoints.

``ds_to_universal.main`` reads a checkpoint folder and writes another one with only DeepSpeed's
files. In a process with hybridcomp our files are copied there too. Usually it runs as a separate
program without hybridcomp; then loading the universal checkpoint takes our files from its source
checkpoint, as long as that is beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.job import saved, small_messages
from hybridcomp.log import say
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session.saved_session import BRING

MAIN = Seam(REQUIREMENT, "deepspeed.checkpoint.ds_to_universal", "main", ("args",))
WHAT = "looking for the state of hybridcomp beside a universal checkpoint"


@around
def make_main(original: Callable[[Any], None], args: Any) -> None:
    """Copy hybridcomp's files once upstream has converted its own."""
    original(args)
    source, target = Path(args.input_folder), Path(args.output_folder)
    if copied := checkpoint_note.copy_files(source, target):
        say(f"{copied} files of hybridcomp were copied from {source} to {target}")


def is_loaded(engine: Any) -> bool:
    """Return whether an engine loads universal checkpoints."""
    return bool(engine.load_universal_checkpoint())


def newest(engine: Any, load_dir: str) -> str | None:
    """Return the tag that upstream loads if the caller names none; None if there is none."""
    name = checkpoint_note.LATEST_UNIVERSAL if is_loaded(engine) else checkpoint_note.LATEST
    path = Path(load_dir, name)
    return path.read_text().strip() if path.is_file() else None


def folder_of_state(engine: Any, folder: Path) -> Path:
    """Return where hybridcomp's files of the checkpoint in ``folder`` are; all ranks call it.

    It is ``folder`` itself, or for a universal checkpoint without them its source checkpoint.
    """
    if not is_loaded(engine):
        return folder
    found, problem = None, None
    if dist.get_rank() == 0:
        found, problem = saved.attempt(lambda: str(beside(engine, folder)))
    saved.all_well(problem, WHAT)
    source = str(small_messages.from_first(found))
    if source != str(folder):
        say(
            f"{folder} has no files of hybridcomp; they are taken from {source}, of which it was "
            f"made. To move it without that folder: {_copy(source, folder)}"
        )
    return Path(source)


def beside(engine: Any, folder: Path) -> Path:
    """Return where hybridcomp's files of the checkpoint in ``folder`` are, as this rank sees it."""
    if not is_loaded(engine) or not folder.is_dir() or any(folder.glob(checkpoint_note.NAMES)):
        return folder
    return checkpoint_note.source_of(folder) or folder


def bring(engine: Any, folder: Path) -> str:
    """Return advice on how to get files that the checkpoint in ``folder`` lacks."""
    if not is_loaded(engine):
        return BRING
    return (
        "To bring them, from the checkpoint that ds_to_universal read: "
        f"{_copy('INPUT_FOLDER', folder)}"
    )


def _copy(source: str, folder: Path) -> str:
    return f"cp {source}/{checkpoint_note.NAMES} {folder}/"


PATCHES = ((MAIN, make_main),)
