"""Save and load the encoded files of optimizer states with DeepSpeed's checkpoints.

DeepSpeed copies the files unchanged into the checkpoint and back. Our own file beside them has
their footers, by which a damaged or swapped file is detected before anything is loaded; the bf16
parameters relative to which masters are encoded, which no other file of the checkpoint has; and the
information that DeepSpeed does not save of an optimizer with states on NVMe: its states and their
step counts. With these a resumed run continues with its moments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.channels.offload.state_files import (
    DTYPES,
    FORMS,
    SWAPPED,
    Footer,
    StateFiles,
    check,
    damaged,
)
from hybridcomp.codecs import make_codec
from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved

#: attribute of an optimizer, or of a swapper of parameters: its files
FILES = "_hybridcomp_state_files"
#: attribute of an optimizer: contents of a checkpoint until they are loaded
LOADED = "_hybridcomp_loaded_states"
#: DeepSpeed's folder for such files in a checkpoint
FOLDER = "offloaded_tensors"
#: codec of the parameters in our file
HALVES = "expcode"
WHAT = "optimizer states of the checkpoint"


def files_of(optimizer: Any) -> StateFiles | None:
    """Return the files of an optimizer; None if DeepSpeed's own are used, or there are none."""
    found: StateFiles | None = getattr(optimizer, FILES, None)
    return found


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of our file of ``rank``."""
    return folder / f"{checkpoint_note.STATES}_rank_{rank:05d}.pt"


def save(folder: Path, optimizer: Any) -> None:
    """Write this rank's file, before DeepSpeed copies those of the states."""
    files = files_of(optimizer)
    if files is None:
        return
    swapped = optimizer.optimizer_swapper.swap_folder
    names = [os.path.basename(path) for path in files.known if os.path.dirname(path) == swapped]
    # DeepSpeed leaves gradients out as well
    names = [name for name in names if "gradient" not in name]
    footers = {name: files.known[os.path.join(swapped, name)] for name in names}
    halves = {}
    for name, data in footers.items():
        footer = Footer.of(data)
        assert footer is not None, "written by this process"
        half = files.half(os.path.join(swapped, name))
        if FORMS[footer.form] == "beside" and half is not None:
            halves[name] = (half.numel(), _encoded(half))
    saved.write(
        path_of(folder, dist.get_rank()),
        {
            "format": saved.FORMAT,
            "rank": dist.get_rank(),
            "footers": {name: data.hex() for name, data in footers.items()},
            "halves": halves,
            "states": _states(optimizer),
        },
    )


def _encoded(half: Tensor) -> Tensor:
    codec = make_codec(HALVES)
    room = torch.empty(codec.wire_nbytes(half.numel(), half.dtype), dtype=torch.uint8, device="cpu")
    return room[: codec.encode(half, room)].clone()


def _states(optimizer: Any) -> dict[str, Any]:
    """Return by sub-group the names of states in files, and the other states themselves.

    The latter include the masters of sub-groups that stay in memory. With NVMe DeepSpeed saves none
    of these states.
    """
    found: dict[str, Any] = {}
    for flat in optimizer.fp32_partitioned_groups_flat:
        info = optimizer.optimizer_swapper.swap_params_info.get(flat.ds_id)
        entries = optimizer.optimizer.state.get(flat, {})
        if info is None:
            whole = {"numel": flat.numel(), "names": [], "rest": dict(entries), "master": flat.data}
            found[str(flat.ds_id)] = whole
            continue
        paths = {os.path.basename(path) for path in info.get_swap_paths()}
        names = [name for name in entries if f"{name}-{flat.ds_id}{SWAPPED}" in paths]
        rest = {name: value for name, value in entries.items() if name not in names}
        found[str(flat.ds_id)] = {"numel": info.numel(), "names": names, "rest": rest}
    return found


def read(folder: Path, engine: Any) -> None:
    """Check this rank's files in a checkpoint, which ``take_over`` then loads.

    Raises CheckpointError or StateFileError if a file is damaged, missing or of another rank, or if
    this job has no key ``states``, so that DeepSpeed would read encoded files as values.
    """
    optimizer = engine.optimizer
    files = files_of(optimizer)
    if files is None:
        refuse(folder)
        return
    path = path_of(folder, dist.get_rank())
    loaded = stored(folder, dist.get_rank()) if path.is_file() else None
    if loaded is not None:
        _hold_to_groups(folder, loaded, optimizer)
        own = engine.local_rank if engine.use_node_local_storage() else dist.get_rank()
        for name, data in footers_of(loaded).items():
            there = folder_of(folder, own) / name
            check(str(there), contents(there), dist.get_rank(), data)
    setattr(optimizer, LOADED, loaded)


def _hold_to_groups(folder: Path, loaded: Mapping[str, Any], optimizer: Any) -> None:
    """Raise CheckpointError if the checkpoint has other sub-groups, and so other file names."""
    numels = optimizer.fp16_partitioned_groups_flat_numel
    flats = optimizer.fp32_partitioned_groups_flat
    here = {str(flat.ds_id): int(n) for flat, n in zip(flats, numels, strict=True)}
    there = {name: int(one["numel"]) for name, one in loaded["states"].items()}
    if there != here:
        raise CheckpointError(
            f"{folder}: its sub-groups are {there} (numbers of parameters and values), those here "
            f"{here}: resume the same model with the same ranks, sub_group_size and nvme settings, "
            "as the first engine of its process"
        )


def refuse(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` has encoded states, which this job cannot read."""
    if any(folder.glob(f"{checkpoint_note.STATES}_rank_*.pt")):
        raise CheckpointError(
            f"{folder} has encoded optimizer states, which DeepSpeed alone cannot read: resume "
            f'with "offload": {{"states": ...}} in the block, or write plain files with '
            f"`hybridcomp states {folder}`"
        )


def folder_of(folder: Path, rank: int) -> Path:
    """Return DeepSpeed's folder of a rank's files in a checkpoint."""
    return folder / FOLDER / f"rank{rank:0>2d}"


def contents(path: Path) -> Tensor:
    """Return the bytes of a file, 1-D uint8. Raises StateFileError if it cannot be read."""
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise damaged(str(path), f"it cannot be read ({error.strerror})") from error
    return (
        torch.frombuffer(data, dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def is_plain(data: Tensor, expected: bytes) -> bool:
    """Return whether a file is exactly as long as its values, which no file of ours is."""
    footer = Footer.of(expected)
    return footer is not None and data.numel() == footer.numel * DTYPES[footer.dtype].itemsize


def stored(folder: Path, rank: int) -> dict[str, Any]:
    """Read ``rank``'s file. Raises CheckpointError if it is damaged."""
    path = path_of(folder, rank)
    found = saved.read(path)
    saved.expect(path, found, "rank", lambda value: value == rank)
    for key in ("footers", "halves", "states"):
        saved.expect(path, found, key, lambda value: isinstance(value, dict))
    for name, text in found["footers"].items():
        if Path(name).name != name or Footer.of(bytes.fromhex(text)) is None:
            raise saved.damaged(path, f"{name!r} has no footer")
    return found


def footers_of(found: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the footers of a checkpoint's files, by name."""
    return {name: bytes.fromhex(text) for name, text in found["footers"].items()}


def halves_of(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the bf16 parameters beside the files, by name."""
    halves = {}
    for name, (numel, payload) in found["halves"].items():
        halves[name] = torch.empty(numel, dtype=torch.bfloat16, device="cpu")
        make_codec(HALVES).decode(payload, halves[name])
    return halves


def take_over(optimizer: Any, files: StateFiles) -> None:
    """Expect the files that DeepSpeed has copied from the checkpoint that was ``read``."""
    loaded = getattr(optimizer, LOADED, None) or {"footers": {}, "halves": {}, "states": {}}
    setattr(optimizer, LOADED, {"states": loaded["states"]})
    folder = optimizer.optimizer_swapper.swap_folder
    files.adopt(folder, footers_of(loaded), halves_of(loaded))


def restore(optimizer: Any, files: StateFiles, sub_group_id: int) -> None:
    """Create the optimizer's entries for a sub-group, and for the one that is read ahead.

    DeepSpeed lists a state's file once the optimizer has that state, and reads it from then on.
    """
    states = (getattr(optimizer, LOADED, None) or {}).get("states", {})
    flat = optimizer.fp32_partitioned_groups_flat[sub_group_id]
    for one in (flat, optimizer.next_swappable_fp32_partitioned_groups[sub_group_id]):
        saved_ones = None if one is None else states.pop(str(one.ds_id), None)
        if saved_ones is None:
            continue
        if "master" in saved_ones:
            one.data.copy_(saved_ones["master"])
        entries = optimizer.optimizer.state[one]
        entries.update(saved_ones["rest"])
        for name in saved_ones["names"]:
            if name not in entries:
                numel = optimizer.optimizer_swapper.swap_params_info[one.ds_id].numel()
                entries[name] = torch.zeros(numel, dtype=one.dtype, device="cpu")
