"""Check the settings and the memory of a table on all ranks before it is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.nn.tables.host_rows import HostRows, room
from hybridcomp.nn.tables.owners import Owners

NAME = "CachedEmbedding"
Mode = Literal["sum", "mean", "max"]
#: fills the rows (n, width) of ids (n,), both on the host
Init = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class TableSettings:
    """Settings of a table, which are equal on all ranks; see ``CachedEmbedding``."""

    rows: int
    width: int
    dtype: torch.dtype
    resident: float
    padding_idx: int | None
    mode: Mode | None
    hashed: bool
    average: bool
    is_counted: bool

    def agree(self, owners: Owners, host: HostRows, frequency: Tensor | None) -> None:
        """Compare the settings of all ranks, and check that there is room. Raises ConfigError."""
        problem: ConfigError | None = None
        try:
            self._check(frequency)
        except ConfigError as error:
            problem = error
        mine = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        agree_on_room(owners, host, host.nbytes((self.width,), self.dtype), mine, problem)

    def _check(self, frequency: Tensor | None) -> None:
        size, width = self.rows, self.width
        if size < 1 or width < 1:
            raise ConfigError(NAME, Shown(f"{size} rows of {width}"), "expected at least 1 of 1")
        if self.dtype not in (torch.float32, torch.bfloat16):
            todo = "rows have no loss scale; use fp32 or bf16"
            raise ConfigError(f"{NAME}.dtype", self.dtype, todo)
        share = isinstance(self.resident, float)
        if not (0 < self.resident <= 1 if share else self.resident >= 1):
            todo = "expected rows of this rank from 1 on, or a share of them up to 1.0"
            raise ConfigError(f"{NAME}.resident", self.resident, todo)
        padding = self.padding_idx
        if padding is not None and (self.hashed or not -size <= padding < size):
            todo = f"expected {-size} to {size - 1}, and none with hashed"
            raise ConfigError(f"{NAME}.padding_idx", padding, todo)
        if self.mode not in (None, "sum", "mean", "max"):
            raise ConfigError(f"{NAME}.mode", self.mode, 'expected None, "sum", "mean" or "max"')
        if frequency is not None and tuple(frequency.shape) != (size,):
            todo = f"expected ({size},): a number for each row"
            raise ConfigError(f"{NAME}.frequency", Shown(str(tuple(frequency.shape))), todo)

    def slots_of(self, rows: int) -> int:
        """Return the slots of a rank with so many rows."""
        share = isinstance(self.resident, float)
        return min(rows, -int(-self.resident * rows // 1) if share else int(self.resident))


def normal(rank: int) -> Init:
    """Return an initializer that draws rows like ``nn.Embedding``, different on each rank.

    The initializer does not advance torch's generator, since ranks have different numbers of rows
    and must draw equal values for the rest of the model.
    """
    seed = torch.initial_seed() + 0x9E3779B9 * rank
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    return lambda rows, ids: rows.normal_(generator=generator)


def agree_on_room(
    owners: Owners,
    host: HostRows,
    nbytes: int,
    statement: dict[str, str],
    problem: ConfigError | None,
) -> None:
    """Check that the settings of all ranks are equal, and that the memory the table needs is free.

    Raises ConfigError on all ranks.
    """
    where, free = "", 0
    try:
        where, free = room(host.folder)
    except OSError as error:
        problem = problem or ConfigError(f"{NAME}.folder", str(host.folder), str(error.strerror))
    mine = {"is": statement, "where": where, "free": free, "nbytes": nbytes}
    said = owners.agree(mine, problem)
    for rank, row in enumerate(said):
        if row["is"] != said[0]["is"]:
            name = next(key for key in said[0]["is"] if row["is"][key] != said[0]["is"][key])
            differing = Shown(f"{row['is'][name]} on rank {rank}")
            todo = f"expected {said[0]['is'][name]}, as on rank 0"
            raise ConfigError(f"{owners.name}.{name}", differing, todo)
        needed = sum(other["nbytes"] for other in said if other["where"] == row["where"])
        if needed > row["free"]:
            todo = (
                f"{needed / 1e9:.1f} GB are needed, {row['free'] / 1e9:.1f} GB are free; use fewer "
                "rows, more ranks, or another folder for mapped files"
            )
            raise ConfigError(owners.name, Shown(row["where"]), todo)
