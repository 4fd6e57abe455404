"""Delta formats of other projects, encoding and decoding, to compare speeds with stepcode.

`int32 + bf16`: positions and new values, as in vLLM's `sparse_nccl`. `gaps`: distances between
changed values as bytes, then the new values, through zstd. `xor`: all bit patterns xor the old
ones, through zstd. All are a few calls of numpy and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.deltas_bench.bits import Compressor, compressors, gaps_and_values


class Other(Protocol):
    """Encoding of ``values`` (bf16) for a receiver that has ``reference``."""

    def encode(self, reference: Tensor, values: Tensor) -> bytes:
        """Return the payload."""

    def decode(self, sent: bytes, reference: Tensor) -> Tensor:
        """Return the values."""


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


def _put(reference: Tensor, places: Tensor, halves: bytes) -> Tensor:
    """Return a copy of ``reference`` with other bit patterns at ``places``."""
    found = reference.clone()
    _bits(found)[places] = torch.frombuffer(bytearray(halves), dtype=torch.int16)
    return found


class Positions:
    """int32 positions, then the values there."""

    def encode(self, reference: Tensor, values: Tensor) -> bytes:
        """Return positions and values."""
        places = (_bits(values) != _bits(reference)).nonzero().view(-1)
        return places.to(torch.int32).numpy().tobytes() + _bits(values)[places].numpy().tobytes()

    def decode(self, sent: bytes, reference: Tensor) -> Tensor:
        """Return the values."""
        count = len(sent) // 6
        if not count:
            return reference.clone()
        places = torch.frombuffer(bytearray(sent[: 4 * count]), dtype=torch.int32)
        return _put(reference, places.long(), sent[4 * count :])


class Gaps:
    """``gaps_and_values`` behind their number, through a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, reference: Tensor, values: Tensor) -> bytes:
        """Return gaps and values, compressed."""
        data = gaps_and_values(reference, values)
        count = int((_bits(values) != _bits(reference)).sum())
        return self._compressor.compress(count.to_bytes(4, "little") + data)

    def decode(self, sent: bytes, reference: Tensor) -> Tensor:
        """Return the values."""
        data = self._compressor.decompress(sent)
        count = int.from_bytes(data[:4], "little")
        if not count:
            return reference.clone()
        gaps = np.frombuffer(data, np.uint8, count, 4).astype(np.int64)
        long = gaps == 255
        gaps[long] = np.frombuffer(data, np.uint32, int(long.sum()), 4 + count)
        places = torch.from_numpy(np.cumsum(gaps + 1) - 1)
        return _put(reference, places, data[len(data) - 2 * count :])


class Xor:
    """All bit patterns xor those of the reference, through a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, reference: Tensor, values: Tensor) -> bytes:
        """Return the differing bits, compressed."""
        return self._compressor.compress((_bits(values) ^ _bits(reference)).numpy().tobytes())

    def decode(self, sent: bytes, reference: Tensor) -> Tensor:
        """Return the values."""
        data = bytearray(self._compressor.decompress(sent))
        return (torch.frombuffer(data, dtype=torch.int16) ^ _bits(reference)).view(torch.bfloat16)


def others() -> dict[str, Other]:
    """Return all of them by name."""
    found: dict[str, Other] = {"int32 + bf16": Positions()}
    for name, compressor in compressors().items():
        found |= {f"gaps, {name}": Gaps(compressor), f"xor, {name}": Xor(compressor)}
    return found


def speeds_of_others(
    reference: Tensor, values: Tensor, repeats: int, timed: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Return GB/s of weights of each way, both directions; raises AssertionError if one is wrong.

    ``timed``: returns the seconds of a call.
    """
    found = {}
    for name, way in others().items():
        payload = way.encode(reference, values)
        if not torch.equal(_bits(way.decode(payload, reference)), _bits(values)):
            raise AssertionError(f"{name} decoded other values")
        encode = min(timed(partial(way.encode, reference, values)) for _ in range(repeats))
        decode = min(timed(partial(way.decode, payload, reference)) for _ in range(repeats))
        found[f"{name}: encode GB/s"] = values.nbytes / encode / 1e9
        found[f"{name}: decode GB/s"] = values.nbytes / decode / 1e9
    return found
