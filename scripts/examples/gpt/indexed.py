"""Megatron's memory-mapped token files: tokens in ``PREFIX.bin``, offsets in ``PREFIX.idx``.

Layout of ``.idx``, little-endian, without padding (``MMapIndexedDataset`` of Megatron-LM and
GPT-NeoX, ``IndexedDataset`` of megatron-core):

====== ======== ================================================================================
bytes  type     field
====== ======== ================================================================================
9      bytes    magic ``MMIDIDX\\0\\0``
8      uint64   version, 1
1      uint8    dtype of the tokens: 1 uint8, 4 int32, 5 int64, 8 uint16, ... (``DTYPES``)
8      uint64   S, number of sequences
8      uint64   D, number of document boundaries: documents + 1
4*S    int32    length of each sequence, in tokens
8*S    int64    where each sequence begins in ``.bin``, in bytes
8*D    int64    first sequence of each document, and S at the end
====== ======== ================================================================================

``.bin`` holds the concatenated sequences. Here a document is one sequence.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
#: dtype code -> dtype of a token; codes 6 and 7 are floats, swapped between megatron-core and
#: GPT-NeoX
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()
}
Tokens = NDArray[np.integer[Any]]


class DatasetError(ValueError):
    """A dataset cannot be read or written; the message names the file, the problem and the fix."""


def paths(prefix: Path) -> tuple[Path, Path]:
    """Return ``PREFIX.bin`` and ``PREFIX.idx``; keeps a dot in PREFIX."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class IndexedWriter:
    """Context manager that writes documents, one ``add`` each.

    The files get their names when the context ends without an exception, so a killed run leaves no
    partial dataset.
    """

    def __init__(self, prefix: Path, dtype: str = "u2") -> None:
        self._bin, self._idx = paths(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = {found: code for code, found in DTYPES.items()}[self._dtype]
        self._lengths: list[int] = []
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = _partial(self._bin).open("wb")

    def add(self, tokens: Tokens) -> None:
        """Append one document: 1-D, not empty."""
        assert tokens.ndim == 1 and tokens.size > 0
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.append(tokens.size)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens written so far."""
        return sum(self._lengths)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is not None:
            _partial(self._bin).unlink()
            return
        _partial(self._idx).write_bytes(self._index())
        os.replace(_partial(self._bin), self._bin)
        os.replace(_partial(self._idx), self._idx)

    def _index(self) -> bytes:
        count = len(self._lengths)
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(min(count, 1), "<i8"), ends[:-1]]).astype("<i8")
        documents = np.arange(count + 1, dtype="<i8")
        header = HEADER.pack(MAGIC, VERSION, self._code, count, len(documents))
        return b"".join([header, lengths.tobytes(), pointers.tobytes(), documents.tobytes()])


class IndexedTokens:
    """Read-only view of a dataset, loaded lazily.

    Raises DatasetError if a file is missing, has another format or does not match its index.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        bin_path, idx_path = paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise DatasetError(f"{path}: no such file; write it with prepare_data.py")
        self._read_index(idx_path)
        expected = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        found = bin_path.stat().st_size
        if found != expected:
            raise DatasetError(
                f"{bin_path}: expected {expected} bytes as its index says, found {found}; "
                "write both files again with scripts/examples/prepare_data.py"
            )
        #: all tokens in the order of the file, memory-mapped
        self.tokens: Tokens = (
            np.memmap(bin_path, dtype=self.dtype, mode="r") if found else np.zeros(0, self.dtype)
        )

    def _read_index(self, path: Path) -> None:
        content = path.read_bytes()
        if len(content) < HEADER.size or not content.startswith(MAGIC):
            raise DatasetError(
                f"{path}: expected an index that begins with {MAGIC!r}, found {content[:9]!r}; "
                "give the prefix of a dataset in Megatron's mmap format"
            )
        _, version, code, count, documents = HEADER.unpack_from(content)
        if version != VERSION or code not in DTYPES:
            raise DatasetError(
                f"{path}: expected version {VERSION} and a dtype of {sorted(DTYPES)}, found "
                f"version {version} and dtype {code}; write the files again"
            )
        self.dtype = DTYPES[code]
        needed = HEADER.size + 12 * count + 8 * documents
        if len(content) < needed:
            raise DatasetError(
                f"{path}: expected {needed} bytes for {count} sequences and {documents} document "
                f"boundaries, found {len(content)}; write the files again"
            )
        offset = HEADER.size
        self.lengths = np.frombuffer(content, "<i4", count, offset)
        self.pointers = np.frombuffer(content, "<i8", count, offset + 4 * count)
        self.documents = np.frombuffer(content, "<i8", documents, offset + 12 * count)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tokens:
        """Return the tokens of one sequence."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def __iter__(self) -> Iterator[Tokens]:
        return (self[index] for index in range(len(self)))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
