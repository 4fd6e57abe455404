"""Encode ascending row numbers by their gaps, in blocks of 128 of one bit width.

Layout of a payload of k numbers, little endian (docs/wire_formats.md): for each block of 128 gaps a
byte with their width, 0 to 40 bits; then the blocks, 128 gaps of that width each. The gap of a
number is the count of integers between its predecessor and it; the gap of the first number is the
number itself. Zeros pad the last block, and the payload to a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridcomp.codecs.base import align
from hybridcomp.errors import CodecError

#: row numbers per block
BLOCK = 128
#: maximum width of a gap in bits: numbers are below 2^40
WIDEST = 40

Bytes = npt.NDArray[np.uint8]


def encode_ids(ids: Tensor) -> Tensor:
    """Return ``ids`` encoded, uint8; ``ids``: (k,) int64 on the host, ascending, 0 to 2^40 - 1."""
    found = ids.numpy()
    gaps = np.diff(found, prepend=-1) - 1
    if len(gaps) and (gaps.min() < 0 or found[-1] >> WIDEST):
        raise CodecError("row numbers: expected ascending ones below 2^40")
    gaps = np.pad(gaps, (0, -len(gaps) % BLOCK)).reshape(-1, BLOCK)
    widths = np.frexp(gaps.max(axis=1, initial=0).astype(np.float64))[1].astype(np.uint8)
    out = np.zeros(_nbytes(widths), dtype=np.uint8)
    out[: len(widths)] = widths
    for width, blocks, places in _by_width(widths):
        bits = (gaps[blocks, :, None] >> np.arange(width)) & 1
        flat = bits.astype(np.uint8).reshape(len(blocks), -1)
        out[places] = np.packbits(flat, axis=1, bitorder="little")
    return torch.from_numpy(out)


def decode_ids(payload: Tensor, count: int, rows: int) -> Tensor:
    """Decode ``count`` row numbers (int64) from ``payload``, uint8 on the host.

    Raises CodecError if the payload is too short or has a number of ``rows`` or more.
    """
    data = payload.numpy()
    widths = data[: -(-count // BLOCK)]
    if len(widths) < -(-count // BLOCK) or widths.max(initial=0) > WIDEST:
        raise CodecError(f"row numbers: expected {count} of them, found damaged widths")
    if len(data) < _nbytes(widths):
        raise CodecError(f"row numbers: expected {_nbytes(widths)} bytes, found {len(data)}")
    gaps = np.zeros((len(widths), BLOCK), dtype=np.int64)
    for width, blocks, places in _by_width(widths):
        bits = np.unpackbits(data[places], axis=1, bitorder="little").reshape(-1, BLOCK, width)
        gaps[blocks] = bits.astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))
    found = np.cumsum(gaps.reshape(-1)[:count] + 1) - 1
    if count and (found[0] < 0 or found[-1] >= rows or (np.diff(found) <= 0).any()):
        raise CodecError(f"row numbers: expected ascending ones below {rows}, found others")
    return torch.from_numpy(found)


def _nbytes(widths: Bytes) -> int:
    """Return the bytes of a payload whose blocks have these widths."""
    return align(len(widths) + BLOCK // 8 * int(widths.sum(dtype=np.int64)))


def _by_width(
    widths: Bytes,
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield each width above 0, the blocks with this width, and a row of byte positions for each
    of these blocks.
    """
    sizes = BLOCK // 8 * widths.astype(np.int64)
    starts = len(widths) + np.cumsum(sizes) - sizes
    for width in np.unique(widths[widths > 0]).tolist():
        blocks = np.flatnonzero(widths == width)
        yield width, blocks, starts[blocks, None] + np.arange(BLOCK // 8 * width)
