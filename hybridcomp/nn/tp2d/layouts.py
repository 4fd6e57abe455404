"""Cut whole weights into the parts of the ranks of a q * q mesh, and join them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError


class WeightCut(Protocol):
    """The cut of a weight over a mesh."""

    def cut(self, whole: Tensor, q: int, row: int, column: int) -> Tensor:
        """Return the part of rank (``row``, ``column``), a copy.

        Raises ConfigError if q does not divide its sizes.
        """

    def join(self, parts: Sequence[Tensor], q: int) -> Tensor:
        """Join the parts of all ranks, ordered by mesh rank, to the whole weight."""


def _check(what: str, length: int, by: int) -> None:
    if length % by:
        todo = f"expected a multiple of {by}; change the size, or the mesh"
        raise ConfigError("tp2d", Shown(f"{length} {what}"), todo)


def _line(parts: Sequence[Tensor], q: int, column: int) -> Sequence[Tensor]:
    """Select one column's parts from all ranks' parts, by row."""
    return [parts[row * q + column] for row in range(q)]


@dataclass(frozen=True)
class MatrixCut:
    """(outputs, inputs): outputs are cut over the columns, inputs over the rows.

    Each of ``parts`` stacked matrices is cut separately, so that a rank's query, key and value
    belong to the same heads.
    """

    parts: int = 1

    def cut(self, whole: Tensor, q: int, row: int, column: int) -> Tensor:
        _check("outputs", whole.shape[0], self.parts * q)
        _check("inputs", whole.shape[1], q)
        wanted = [part.chunk(q)[column] for part in whole.chunk(self.parts)]
        return torch.cat(wanted).chunk(q, dim=1)[row].clone()

    def join(self, parts: Sequence[Tensor], q: int) -> Tensor:
        columns = [torch.cat(list(_line(parts, q, column)), dim=1) for column in range(q)]
        cut = [column.chunk(self.parts) for column in columns]
        return torch.cat([column[part] for part in range(self.parts) for column in cut])


@dataclass(frozen=True)
class Table:
    """(vocabulary, features): words are cut over the rows of the mesh, features over its columns.

    The vocabulary is padded to a multiple of q with rows of zeros, which no token selects.
    """

    vocabulary: int

    def rows(self, q: int) -> int:
        """Return the number of table rows of each rank."""
        return -(-self.vocabulary // q)

    def cut(self, whole: Tensor, q: int, row: int, column: int) -> Tensor:
        """Return the part (vocabulary / q, features / q), rounded up."""
        _check("features", whole.shape[1], q)
        rows = self.rows(q)
        out = whole.new_zeros(rows, whole.shape[1] // q)
        part = whole[row * rows : (row + 1) * rows].chunk(q, dim=1)[column]
        out[: len(part)] = part
        return out

    def join(self, parts: Sequence[Tensor], q: int) -> Tensor:
        columns = [torch.cat(list(_line(parts, q, column))) for column in range(q)]
        return torch.cat(columns, dim=1)[: self.vocabulary].clone()


@dataclass(frozen=True)
class Output:
    """(vocabulary, features) of an output layer: a ``MatrixCut`` with a padded vocabulary."""

    vocabulary: int

    def cut(self, whole: Tensor, q: int, row: int, column: int) -> Tensor:
        missing = -self.vocabulary % q
        filled = torch.cat([whole, whole.new_zeros(missing, whole.shape[1])])
        return MatrixCut().cut(filled, q, row, column)

    def join(self, parts: Sequence[Tensor], q: int) -> Tensor:
        return MatrixCut().join(parts, q)[: self.vocabulary].clone()


@dataclass(frozen=True)
class Vector:
    """(features,): cut over the columns, then each part over the rows; no value is on two ranks.

    ``parts``: as for ``MatrixCut``.
    """

    parts: int = 1

    def cut(self, whole: Tensor, q: int, row: int, column: int) -> Tensor:
        _check("features of a vector", len(whole), self.parts * q)
        _check("features of a vector", len(whole), q * q)
        wanted = torch.cat([part.chunk(q)[column] for part in whole.chunk(self.parts)])
        return wanted.chunk(q)[row].clone()

    def join(self, parts: Sequence[Tensor], q: int) -> Tensor:
        columns = [torch.cat(list(_line(parts, q, column))) for column in range(q)]
        cut = [column.chunk(self.parts) for column in columns]
        return torch.cat([column[part] for part in range(self.parts) for column in cut])
