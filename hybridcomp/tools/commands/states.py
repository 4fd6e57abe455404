"""Write plain files of optimizer states into a checkpoint: ``hybridcomp states FOLDER``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DESCRIPTION = """\
Decode the optimizer states in a checkpoint of a run with "offload": {"states": ...}, so that a job
without hybridcomp can resume from it. All files are checked before the first is replaced; what is
interrupted is done by calling it again.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``states`` to the commands of the command line."""
    parser = commands.add_parser(
        "states", help="decode the NVMe optimizer states of a checkpoint", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="of one checkpoint, or the one above `latest`")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Decode the files of all ranks; returns the exit status. Raises HybridcompError."""
    from hybridcomp.channels.checkpoint import checkpoint_note
    from hybridcomp.errors import ConfigError
    from hybridcomp.patches.ds.offload import saved_states

    folder = checkpoint_note.folder_of(options.folder)
    paths = sorted(folder.glob(f"{checkpoint_note.STATES}_rank_*.pt"))
    if not paths:
        todo = "it has no encoded optimizer states: DeepSpeed reads it as it is"
        raise ConfigError("FOLDER", str(folder), todo)
    ranks = [int(path.stem.rpartition("_")[2]) for path in paths]
    for rank in ranks:
        _decode(folder, rank, write=False)
    count = sum(_decode(folder, rank, write=True) for rank in ranks)
    for rank in ranks:
        saved_states.path_of(folder, rank).unlink()
    checkpoint_note.forget(folder, checkpoint_note.STATES)
    print(f"{count} files of {len(ranks)} ranks are plain now, as DeepSpeed alone writes them")
    return 0


def _decode(folder: Path, rank: int, write: bool) -> int:
    """Check and decode the files of ``rank`` in memory; with ``write`` also on disk."""
    import torch

    from hybridcomp.channels.offload.state_files import DTYPES, NEW, check, unpack
    from hybridcomp.patches.ds.offload import saved_states

    stored = saved_states.stored(folder, rank)
    halves, footers = saved_states.halves_of(stored), saved_states.footers_of(stored)
    for name, expected in footers.items():
        path = saved_states.folder_of(folder, rank) / name
        data = saved_states.contents(path)
        if saved_states.is_plain(data, expected):  # decoded by an earlier call
            continue
        footer = check(str(path), data, rank, expected)
        values = torch.empty(footer.numel, dtype=DTYPES[footer.dtype])
        unpack(str(path), data, footer, halves.get(name), values)
        if write:
            new = path.with_name(path.name + NEW)
            new.write_bytes(values.view(torch.uint8).numpy().data)
            os.replace(new, path)
    return len(footers)
