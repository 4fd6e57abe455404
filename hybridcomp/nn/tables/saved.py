"""Save and load the rows of a table in a file per rank and state, for any number of ranks.

A folder has one ``rows.json``, which states the token in the other files' names. There is one file
per state and rank, ``rows.TOKEN.STATE.RANK-of-RANKS.bin``, little endian, with row i at position
i // ranks of rank i % ranks. ``rows.json`` has a checksum (CRC-32) of each piece of 64 MiB. It is
replaced once all files are written; then all other files are removed. So the previous save survives
any interrupted save.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import secrets
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.escaping import quoted_path
from hybridcomp.nn.tables.host_rows import pieces
from hybridcomp.nn.tables.slots import RowTable

MANIFEST = "rows.json"
#: name of a file that a save wrote
FILE = re.compile(r"rows\.[0-9a-f]{8}\.[a-z_]+\.\d+-of-\d+\.bin")
#: folders in which tables of this process are saved
_folders: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()


class SavedRows(BaseModel):
    """Model ``rows.json``, which describes the files of a saved table.

    Attributes:
        rows, width: size of the table. ranks: number of ranks that wrote the files.
        token: part of the files' names.
        states: dtype and row shape of each state, ``weight`` among them.
        sums: for each state and rank, the checksums of its file's pieces.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = Field(1, ge=1, le=1)
    rows: int = Field(ge=1)
    width: int = Field(ge=1)
    ranks: int = Field(ge=1)
    token: str = Field(pattern=r"^[0-9a-f]{8}$")
    states: dict[str, list[int | str]]
    sums: dict[str, list[list[int]]]

    def file(self, state: str, rank: int) -> str:
        return f"rows.{self.token}.{state}.{rank}-of-{self.ranks}.bin"

    def count(self, rank: int) -> int:
        return (self.rows - rank + self.ranks - 1) // self.ranks


def save(table: RowTable, folder: Path) -> None:
    """Write this rank's rows on the host to files; see ``CachedEmbedding.save``."""
    owners = table.owners
    (token, *_) = owners.agree({"token": secrets.token_hex(4)}, _claimed(table, folder.resolve()))
    states = {name: _kind(values) for name, values in table.host.states.items()}
    shape = {"rows": table.num_embeddings, "width": table.embedding_dim, "ranks": owners.ranks}
    saved = SavedRows(**shape, token=token["token"], states=states, sums={})
    mine: dict[str, list[int]] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in table.host.states.items():
            mine[name] = _write(folder / saved.file(name, owners.rank), values)
        problem = None
    except OSError as error:
        problem = CheckpointError(f"{quoted_path(folder)}: {error.strerror}; nothing was replaced")
    try:
        said = owners.agree({"sums": mine}, problem)
        saved.sums = {name: [statement["sums"][name] for statement in said] for name in mine}
        if owners.rank == 0:
            problem = _replace(folder, saved)
        owners.agree({}, problem)
    except CheckpointError:
        for name in table.host.states:
            with contextlib.suppress(OSError):
                (folder / saved.file(name, owners.rank)).unlink(missing_ok=True)
        raise
    if owners.rank == 0:
        for path in folder.iterdir():
            if FILE.fullmatch(path.name) and f".{saved.token}." not in path.name:
                path.unlink(missing_ok=True)


def _claimed(table: RowTable, folder: Path) -> ConfigError | None:
    """Claim ``folder`` for this table; return the problem if another table has claimed it."""
    if _folders.setdefault(folder, table) is not table:
        gc.collect()  # an unused table may live on in a reference cycle
    if _folders.setdefault(folder, table) is table:
        return None
    todo = "give each table a folder of its own"
    return ConfigError("CachedEmbedding.save", Shown("the folder of another table"), todo)


def load(table: RowTable, folder: Path, states: bool) -> None:
    """Check the files that this rank needs; read them once all ranks have checked theirs."""
    problem, saved, names = None, None, []
    try:
        saved = _read_manifest(folder)
        names = _names(table, saved, states)
        for name in names:
            for rank in _files(table, saved):
                for _ in _pieces(folder, saved, name, rank):
                    pass
    except CheckpointError as error:
        problem = error
    table.owners.agree({"token": None if saved is None else saved.token}, problem)
    assert saved is not None
    for name, values in table.host.states.items():
        if name not in names:
            values.zero_()
            continue
        for rank in _files(table, saved):
            for ids, piece in _pieces(folder, saved, name, rank):
                is_mine = ids % table.owners.ranks == table.owners.rank
                values[ids[is_mine] // table.owners.ranks] = piece[is_mine]
    table.reload()


def full_weight(table: RowTable) -> Tensor | None:
    """Gather the exact weight on the first rank, in pieces."""
    owners, weight = table.owners, table.host.states["weight"]
    is_first, out = owners.rank == 0, None
    if is_first:
        out = torch.empty(
            (table.num_embeddings, table.embedding_dim), dtype=weight.dtype, device="cpu"
        )
    for low, high in pieces(owners.count(0), weight[:1].nbytes):
        counts = [max(0, min(high, owners.count(r)) - low) for r in range(owners.ranks)]
        gives = [counts[owners.rank] if rank == 0 else 0 for rank in range(owners.ranks)]
        takes = counts if is_first else [0] * owners.ranks
        got = owners.exchange_exactly(weight[low : low + sum(gives)], gives, takes)
        if out is not None:
            for rank, part in enumerate(torch.split(got, counts)):
                first = rank + low * owners.ranks
                out[first : first + len(part) * owners.ranks : owners.ranks] = part
    return out


def _kind(values: Tensor) -> list[int | str]:
    return [str(values.dtype).removeprefix("torch."), *values.shape[1:]]


def _write(path: Path, values: Tensor) -> list[int]:
    """Write a state's rows; return the checksums of its pieces."""
    sums = []
    with path.open("xb") as file:
        for low, high in pieces(len(values), values[:1].nbytes):
            data = _bytes(values[low:high])
            sums.append(zlib.crc32(data))
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return sums


def _bytes(values: Tensor) -> memoryview:
    data: Any = values.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _replace(folder: Path, saved: SavedRows) -> CheckpointError | None:
    new = folder / f"{MANIFEST}.new"
    try:
        with new.open("w") as file:
            file.write(saved.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / MANIFEST)
    except OSError as error:
        return CheckpointError(f"{quoted_path(new)}: {error.strerror}; nothing was replaced")
    return None


def _read_manifest(folder: Path) -> SavedRows:
    path = folder / MANIFEST
    try:
        saved = SavedRows.model_validate_json(path.read_bytes())
    except OSError as error:
        todo = "expected a folder of CachedEmbedding.save"
        raise CheckpointError(f"{quoted_path(path)}: {error.strerror}; {todo}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise CheckpointError(
            f"{quoted_path(path)}: {where!r} is damaged ({first['type']}); load another save"
        ) from None
    return saved


def _names(table: RowTable, saved: SavedRows, states: bool) -> list[str]:
    """Return the states to load. Raises CheckpointError if the files have other states."""
    shape = (saved.rows, saved.width)
    if shape != (table.num_embeddings, table.embedding_dim):
        wanted = (table.num_embeddings, table.embedding_dim)
        raise CheckpointError(f"{table.name}: expected {wanted} rows and values, found {shape}")
    names = [name for name in table.host.states if states or name == "weight"]
    for name in names:
        wanted_kind, kept = _kind(table.host.states[name]), saved.states.get(name)
        if kept != wanted_kind:
            raise CheckpointError(
                f"{table.name}: expected {name} of {wanted_kind}, found {kept}; load with the "
                "method and dtype that saved, or weights alone with states=False"
            )
    lost = sorted(set(saved.states) - set(table.host.states))
    if lost and states:
        raise CheckpointError(
            f"{table.name}: found states {lost}, which no RowOptimizer of it has; make that first, "
            "or load weights alone with states=False"
        )
    return names


def _files(table: RowTable, saved: SavedRows) -> Iterator[int]:
    """Yield the saving ranks whose files contain rows that this rank owns now."""
    step = math.gcd(saved.ranks, table.owners.ranks)
    yield from (r for r in range(saved.ranks) if (r - table.owners.rank) % step == 0)


def _pieces(
    folder: Path, saved: SavedRows, name: str, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and values of a file's pieces. Raises CheckpointError where it is damaged."""
    path = folder / saved.file(name, rank)
    dtype, *tail = saved.states[name]
    like = torch.empty((1, *map(int, tail)), dtype=getattr(torch, str(dtype)), device="cpu")
    every = saved.sums.get(name, [])
    sums = every[rank] if rank < len(every) else []
    borders = pieces(saved.count(rank), like.nbytes)
    try:
        if len(sums) != len(borders) or path.stat().st_size != saved.count(rank) * like.nbytes:
            raise CheckpointError(f"{quoted_path(path)}: its size is not that of {MANIFEST}")
        with path.open("rb") as file:
            for number, (low, high) in enumerate(borders):
                data = bytearray(file.read((high - low) * like.nbytes))
                if zlib.crc32(data) != sums[number]:
                    todo = "it was changed or damaged; load another save"
                    raise CheckpointError(f"{quoted_path(path)}: wrong checksum; {todo}")
                ids = rank + saved.ranks * torch.arange(low, high, device="cpu")
                yield ids, torch.frombuffer(data, dtype=like.dtype).view(-1, *like.shape[1:])
    except OSError as error:
        raise CheckpointError(f"{quoted_path(path)}: {error.strerror}; load another save") from None
