"""Lengths of the parts of an all-to-all, by rank, with the sums that messages need.

Walking over a list of lengths several times would cost every message time, so a list is read once.
A list that is passed again, as by the backward pass of an exchange, is recognized by its identity
and compared with a copy, which takes a nanosecond per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.codecs.launches import read_lengths

Lengths = npt.NDArray[np.int64]
#: most lists of lengths that are remembered; a list holds a number for each rank of its group
MOST_KNOWN = 64


class Splits:
    """Lengths of parts by group rank, in elements or bytes; not modified, compared by identity.

    Attributes:
        array: the lengths, int64.
        total: their sum, computed unless given.
        beyond: for a group rank and a set of remote ranks, ``(sum of all parts except the rank's
            own, sum of the parts of remote ranks)``.
    """

    def __init__(self, lengths: Lengths | Sequence[int], total: int | None = None) -> None:
        self.array = np.asarray(lengths, dtype=np.int64)
        self.total = int(self.array.sum()) if total is None else total
        self.beyond = _Beyond(self.array, self.total)

    @cached_property
    def least(self) -> int:
        """Return the shortest length."""
        return int(self.array.min())

    @cached_property
    def each(self) -> int:
        """Return the common length of all parts if they are equally long, else 0."""
        return self.least if self.least == int(self.array.max()) else 0

    @staticmethod
    def of(splits: Sequence[int] | Splits, row: int = 1) -> Splits:
        """Return ``splits``, given in rows of ``row`` elements, in elements."""
        if isinstance(splits, Splits):
            return splits
        key = (id(splits), row)
        known = _known.get(key)
        if known is not None and known[0] == splits:
            return known[1]
        made = Splits._read(splits, row)
        if isinstance(splits, (list, tuple)):
            while len(_known) >= MOST_KNOWN:
                del _known[next(iter(_known))]
            _known[key] = (splits[:], made)
        return made

    @staticmethod
    def _read(splits: Sequence[int], row: int) -> Splits:
        array = np.empty(len(splits), dtype=np.int64)
        total, least, most = read_lengths(splits, row, array)
        made = Splits(array, total)
        made.least, made.each = least, least if least == most else 0
        return made

    @staticmethod
    @lru_cache(maxsize=1024)
    def even(each: int, ranks: int) -> Splits:
        """Return parts of ``each`` elements for ``ranks`` ranks."""
        return Splits(np.full(ranks, each, dtype=np.int64))

    @cached_property
    def numels(self) -> list[int]:
        """Return the lengths as a list for torch, which must not be changed."""
        found: list[int] = self.array.tolist()
        return found

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rank: int) -> int:
        return int(self.array[rank])


class _Beyond(dict[tuple[int, frozenset[int]], tuple[int, int]]):
    """Sums of parts for other ranks, computed on first use."""

    def __init__(self, array: Lengths, total: int) -> None:
        super().__init__()
        self._array, self._total = array, total

    def __missing__(self, key: tuple[int, frozenset[int]]) -> tuple[int, int]:
        rank, remote = key
        far = int(self._array[list(remote)].sum()) if remote else 0
        self[key] = found = self._total - int(self._array[rank]), far
        return found


#: (identity of a list, elements of a row) -> (copy of the list, its ``Splits``)
_known: dict[tuple[int, int], tuple[Any, Splits]] = {}
