"""Write and read ``hybridcomp_checkpoint.json``, which describes a compressed run's checkpoint.

A job without hybridcomp loads such a checkpoint and silently ignores our files. The note explains
them to a person who looks into the folder, to ``hybridcomp validate FILE --checkpoint FOLDER``, and
to a job with hybridcomp but without a block, which prints a warning on loading.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import show
from hybridcomp.errors import ConfigError, installed
from hybridcomp.job import saved
from hybridcomp.job.launcher import start_command

FILE = "hybridcomp_checkpoint.json"
#: pattern of all our files in a checkpoint folder
NAMES = "hybridcomp_*"
#: DeepSpeed's files that name the newest checkpoint, and the newest universal one
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
FORMAT = 1
#: upper limit on the number of ranks that a note may state
MOST_RANKS = 10**6
#: kind of file, one for each rank -> what its files hold
RESIDUALS, PARAMETERS = "hybridcomp_residuals", "hybridcomp_parameters"
STATES = "hybridcomp_states"
HOLDS = {
    RESIDUALS: "what error feedback has left out so far, and what guard and when: auto decided",
    PARAMETERS: "the parameters that deltas (zero.delta) are added to",
    STATES: "checksums of the encoded optimizer states in offloaded_tensors, and parameters that "
    "their masters are encoded beside",
}
SELF_CONTAINED = (
    "Saved by a training whose communication hybridcomp compresses. Weights and optimizer states "
    "are exact and need nothing of hybridcomp to be loaded."
)
NEEDS_US = (
    "Saved by a training whose communication hybridcomp compresses. Weights and optimizer states "
    "are exact and load without it, but the files named below belong to the state of the run: a "
    "job that is resumed without hybridcomp drops them without a word, and goes on uncompressed. "
    "Resume with the block below in the DeepSpeed file and {start} (or hybridcomp.install() "
    "first), with megatron-core hybridcomp.load_state(FOLDER); check with `hybridcomp validate "
    "DS_CONFIG --checkpoint FOLDER`."
)

ENCODED = (
    " Its optimizer states are encoded: DeepSpeed alone stops at them, and `hybridcomp states "
    "FOLDER` writes plain files in their place."
)


def write(
    folder: Path, config: CompressionConfig, step: int, world_size: int, kinds: Sequence[str]
) -> None:
    """Write the note into the folder of a checkpoint; one rank calls it.

    ``kinds``: keys of ``HOLDS``; every rank writes one file of each kind. Raises CheckpointError.
    """
    text = NEEDS_US.format(start=start_command()) if kinds else SELF_CONTAINED
    note = {
        "README": text + ENCODED * (STATES in kinds),
        "format": FORMAT,
        "hybridcomp": installed("hybridcomp"),
        "step": step,
        "world_size": world_size,
        "files": {f"{kind}_rank_*.pt": HOLDS[kind] for kind in kinds},
        "error_feedback": config.error_feedback("dp"),
        "digest": config.digest(),
        "compression": config.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    saved.write_json(folder / FILE, note, indent=1)


def read(folder: Path) -> dict[str, Any] | None:
    """Read the note in ``folder``; return None without one. Raises ConfigError if it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), str(error), "expected JSON; remove or restore it") from None
    if not isinstance(note, dict) or not isinstance(note.get("files"), dict):
        raise ConfigError(str(path), "no note", "expected what hybridcomp saved; remove it")
    ranks: Any = note.get("world_size")
    if not saved.is_count(ranks) or ranks > MOST_RANKS:
        found = {"world_size": ranks}
        raise ConfigError(str(path), show(found), "expected a number of ranks; remove the note")
    if not all(isinstance(what, str) for what in note["files"].values()):
        todo = "expected a sentence about each; remove the note"
        raise ConfigError(str(path), show(note["files"]), todo)
    return note


def forget(folder: Path, kind: str) -> None:
    """Remove files of ``kind`` from the note in ``folder``. Raises CheckpointError."""
    note = read(folder)
    if note is not None:
        note["files"].pop(f"{kind}_rank_*.pt", None)
        note["README"] = note["README"].replace(ENCODED, "") if note["files"] else SELF_CONTAINED
        saved.write_json(folder / FILE, note, indent=1)


def lacking(folder: Path, lost: Sequence[str], bring: str) -> list[str]:
    """Return a line on the state that restarts because ``folder`` lacks our files, or nothing.

    ``bring``: a sentence on how to copy the files there.
    """
    if not lost:
        return []
    return [f"{folder} lacks files of hybridcomp, {NAMES}: {', '.join(lost)}. {bring}"]


def source_of(universal: Path) -> Path | None:
    """Return the checkpoint from which a DeepSpeed ``universal`` one was made, if it is beside it.

    ``ds_to_universal`` copies the model state files but none of ours. So the source is the folder
    that holds our state and the same model state files.
    """
    states = sorted(universal.glob("*model_states.pt"))
    for folder in sorted(universal.parent.iterdir()) if states else ():
        others = [folder / path.name for path in states]
        if (
            folder != universal
            and any(folder.glob(NAMES))
            and all(path.is_file() for path in others)
            and all(map(filecmp.cmp, states, others))
        ):
            return folder
    return None


def copy_files(source: Path, target: Path) -> int:
    """Copy our files of a checkpoint to another folder; return how many. Raises CheckpointError."""
    copied = 0
    for path in source.glob(NAMES):
        try:
            shutil.copy2(path, target)
        except OSError as error:
            raise saved.unwritten(target / path.name, error) from error
        copied += 1
    return copied


def folder_of(place: Path, latest_file: str = LATEST) -> Path:
    """Return the folder of one checkpoint: ``place``, or the one that its ``latest_file`` names.

    In an output folder of Hugging Face's Trainer that is the last checkpoint. Raises ConfigError if
    there is no such folder.
    """
    steps = {
        int(path.name.rpartition("-")[2]): path
        for path in place.glob("checkpoint-*/")
        if path.name.rpartition("-")[2].isdecimal()
    }
    if steps and not (place / latest_file).is_file():
        place = steps[max(steps)]
    if (latest := place / latest_file).is_file():
        place = place / latest.read_text(encoding="utf-8", errors="backslashreplace").strip()
    if not place.is_dir():
        raise ConfigError("--checkpoint", str(place), "expected the folder of a checkpoint")
    return place


def missing(folder: Path, note: Mapping[str, Any]) -> list[str]:
    """Return the names of files that the note lists and the folder lacks."""
    names = [
        pattern.replace("*", f"{rank:05d}")
        for pattern in note["files"]
        for rank in range(note["world_size"])
    ]
    return [name for name in names if not (folder / name).is_file()]


def wrote_none(folder: Path, kind: str) -> bool:
    """Return whether the save of ``folder`` wrote no files of ``kind``, a key of ``HOLDS``."""
    try:
        note = read(folder)
    except ConfigError:
        return False
    return note is not None and f"{kind}_rank_*.pt" not in note["files"]


def dropped(folder: Path, block: CompressionConfig | None) -> list[str]:
    """Return warnings on the state in ``folder`` that a job with ``block`` (None: no block) drops.

    Empty where it takes over everything, and for checkpoints without a note.
    """
    try:
        note = read(folder)
    except ConfigError as error:
        return [f"WARNING: {error}"]  # the note is damaged, but the checkpoint itself may be sound
    if note is None or not note["files"]:
        return []
    if block is None:
        lost = "; ".join(f"{pattern}: {what}" for pattern, what in note["files"].items())
        whose = "this job has no block"
    elif note.get("error_feedback") and not block.error_feedback("dp"):
        lost, whose = HOLDS[RESIDUALS], "this job's block has no error feedback under dp"
    else:
        return []
    return [
        f"WARNING: {folder} is of a compressed run, and {whose}: dropped are {lost}. To take them "
        f"over, resume with the block that {FILE} holds"
    ]
