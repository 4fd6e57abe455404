"""Damage, in fifty ways, the files that hybridcomp adds to a checkpoint's folder.

Each damage changes a folder with two ranks' files and lists the words that the error must contain.
``flips`` are seeded bit flips in any record.
"""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.quantized_residual import as_fp32
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CheckpointError

FILE = "hybridcomp_residuals_rank_{:05d}.pt"
STATE = "hybridcomp_state.json"
#: number of bit flips in records, and of truncations
FLIPS, CUTS = 16, 6


#: settings of the job whose files are damaged
BLOCK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}}
STEP, NUMEL = 5, 300


@dataclass(frozen=True)
class Damage:
    """``apply`` damages the folder; the error must contain all of ``names``."""

    title: str
    apply: Callable[[Path], None]
    names: tuple[str, ...]


def damages(seed: int = 1) -> list[Damage]:
    """Return all damages; deterministic in the seed."""
    return [*_flips(seed), *_cuts(seed), *_contents(), *_files(), *_states()]


def _flips(seed: int) -> Iterator[Damage]:
    for number in range(FLIPS):
        rank = number % 2

        def apply(folder: Path, number: int = number, rank: int = rank) -> None:
            flip_record(folder / FILE.format(rank), random.Random(f"{seed} {number}"))

        yield Damage(f"flipped bit {number}", apply, (f"rank {rank}", FILE.format(rank)))


def flip_record(path: Path, choose: random.Random) -> None:
    """Flip a bit of a record's bytes; zip headers and padding hold no data of ours."""
    with zipfile.ZipFile(path) as archive:
        infos = [info for info in archive.infolist() if info.file_size]
    info = choose.choice(infos)
    data = bytearray(path.read_bytes())
    # a local header: 30 bytes, the name and an extra field whose lengths are at 26 and 28
    start = info.header_offset
    name, extra = (int.from_bytes(data[start + at : start + at + 2], "little") for at in (26, 28))
    at = start + 30 + name + extra + choose.randrange(info.file_size)
    data[at] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def _cuts(seed: int) -> Iterator[Damage]:
    for number in range(CUTS):
        rank = number % 2

        def apply(folder: Path, number: int = number, rank: int = rank) -> None:
            path = folder / FILE.format(rank)
            whole = path.read_bytes()
            choose = random.Random(f"{seed} cut {number}")
            path.write_bytes(whole[: choose.randrange(len(whole)) if number else 0])

        yield Damage(f"cut {number}", apply, (f"rank {rank}", FILE.format(rank)))


def _changed(rank: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / FILE.format(rank)
        stored = torch.load(path, weights_only=True)
        change(stored)
        torch.save(stored, path)

    return apply


def _contents() -> Iterator[Damage]:
    """Yield files with wrong contents: other versions, wrong types."""
    halves = torch.zeros(4, dtype=torch.float16)
    for key, value in (
        ("format", 2), ("format", "1"), ("format", None), ("world_size", 0), ("world_size", -2),
        ("world_size", "2"), ("world_size", 2.5), ("loss_scale", 0.0), ("loss_scale", -1.0),
        ("loss_scale", float("inf")), ("loss_scale", float("nan")), ("loss_scale", "one"),
        ("residuals", None), ("residuals", {}), ("residuals", {"sender": {}, "other": {}}),
        ("residuals", {"sender": {"w": 3}, "owner": {}}),
        ("residuals", {"sender": {"w": [(0, halves)]}, "owner": {}}),
        ("residuals", {"sender": {"w": [(-1, torch.zeros(4))]}, "owner": {}}),
        ("guard", [1]), ("factors", 7),
    ):  # fmt: skip

        def put(stored: dict[str, Any], key: str = key, value: Any = value) -> None:
            stored[key] = value

        yield Damage(f"{key} {value!r}", _changed(1, put), ("rank 1", FILE.format(1), key))
    for key in ("format", "world_size", "loss_scale", "residuals"):

        def take(stored: dict[str, Any], key: str = key) -> None:
            del stored[key]

        yield Damage(f"no {key}", _changed(0, take), ("rank 0", FILE.format(0), key))


def _files() -> Iterator[Damage]:
    """Yield missing files, files of another rank, step or job, and foreign files."""
    first, second = FILE.format(0), FILE.format(1)
    yield Damage("rank 0's is missing", lambda folder: (folder / first).unlink(), (first,))
    yield Damage("rank 1's is missing", lambda folder: (folder / second).unlink(), (second,))
    yield Damage(
        "rank 0's twice",
        lambda folder: _nothing(shutil.copy(folder / first, folder / second)),
        ("rank 1", second),
    )
    yield Damage(
        "another step", _changed(1, lambda stored: stored.update(step=9)), (second, "step 9")
    )
    yield Damage(
        "another number of ranks",
        _changed(1, lambda stored: stored.update(world_size=4)),
        (second, "world_size 4"),
    )
    yield Damage(
        "three ranks, two files",
        lambda folder: [_changed(r, lambda s: s.update(world_size=3))(folder) for r in (0, 1)][0],
        (FILE.format(2),),
    )
    yield Damage(
        "a text", lambda folder: _nothing((folder / second).write_text("hello")), (second,)
    )
    yield Damage(
        "a tensor", lambda folder: torch.save(torch.zeros(3), folder / second), (second, "format")
    )


def _states() -> Iterator[Damage]:
    """Yield damages of the file that ``save_state`` writes beside Megatron's checkpoints."""
    for title, text in (
        ("empty", ""), ("cut", '{"format": 1, "st'), ("a list", "[1]"),
        ("format 2", json.dumps({"format": 2, "step": 1, "loss_scale": 1.0, "groups": {}})),
        ("no step", json.dumps({"format": 1, "loss_scale": 1.0, "groups": {}})),
        ("step -1", json.dumps({"format": 1, "step": -1, "loss_scale": 1.0, "groups": {}})),
        ("loss_scale 0", json.dumps({"format": 1, "step": 1, "loss_scale": 0, "groups": {}})),
        ("groups 3", json.dumps({"format": 1, "step": 1, "loss_scale": 1.0, "groups": 3})),
    ):  # fmt: skip

        def apply(folder: Path, text: str = text) -> None:
            (folder / STATE).write_text(text)

        yield Damage(f"{STATE}: {title}", apply, ("rank 0", STATE))


def _nothing(_: object) -> None:
    return None


def try_all(folder: str, seed: int = 1) -> list[tuple[str, str]]:
    """Resume each of two ranks from every damaged folder; return titles and problems.

    Every rank must raise a CheckpointError with all names and keep its residuals unchanged.
    """
    from hybridcomp.channels.checkpoint import save_load as checkpoint

    channels, rank = _channels(), dist.get_rank()
    good = Path(folder, "good")
    checkpoint.save(good, channels, 1.0, {})
    found = []
    for number, damage in enumerate(damages(seed)):
        here = Path(folder, str(number))
        if rank == 0:
            shutil.copytree(good, here)
            damage.apply(here)
        dist.barrier()
        before = channels.residuals.norm()
        try:
            if damage.title.startswith(STATE):
                checkpoint.read_state(here)
            else:
                checkpoint.load(here, channels, 1.0)
            problem = "no error"
        except CheckpointError as error:
            missing = [name for name in damage.names if name not in str(error)]
            problem = f"{missing} not in: {error}" if missing else ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if channels.residuals.norm() != before:
            problem += "; the residuals changed"
        found.append((damage.title, problem))
        dist.barrier()
    return found


def _channels() -> Channels:
    channels = Channels(CompressionConfig.parse(BLOCK))
    channels.step = STEP
    flat = as_fp32(channels.residuals.get("sender", [Piece("w", 0, NUMEL)], torch.zeros(1)))
    flat.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
    return channels
