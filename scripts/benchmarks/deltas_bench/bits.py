"""Count the bits that the deltas of a trace need, and the bits of each encoding."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridcomp.codecs import Codec, StepCode, make_codec

Numbers = NDArray[np.int64]


def _patterns(values: Tensor) -> Numbers:
    return values.view(torch.int16).numpy().astype(np.int64) & 0xFFFF


def steps(reference: Tensor, values: Tensor) -> tuple[Numbers, Numbers]:
    """Return exponents of the bf16 ``reference``, and deltas between the ordered integers."""
    old, new = _patterns(reference), _patterns(values)

    def ordered(bits: Numbers) -> Numbers:
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits & 0x7FFF)

    return old >> 7 & 0xFF, ordered(new) - ordered(old)


def counts_of(exponents: Numbers, moved: Numbers) -> Iterator[Numbers]:
    """Yield, for each exponent, how often each delta occurs."""
    for exponent in np.unique(exponents):
        yield np.unique(moved[exponents == exponent], return_counts=True)[1]


def entropy_bits(exponents: Numbers, moved: Numbers) -> float:
    """Return the entropy of all deltas in bits, given the exponents."""
    return float(sum(-(n * np.log2(n / n.sum())).sum() for n in counts_of(exponents, moved)))


def short_code_bits(exponents: Numbers, moved: Numbers) -> int:
    """Return bits of a Huffman code for each exponent, tables not counted."""
    return sum(_huffman_bits(counts) for counts in counts_of(exponents, moved))


def _huffman_bits(counts: Numbers) -> int:
    heap = [int(count) for count in counts]
    if len(heap) == 1:
        return heap[0]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        total += both
        heapq.heappush(heap, both)
    return total


def static_bits(exponents: Numbers, moved: Numbers) -> float:
    """Return bits under a fixed model: Laplace deltas with one scale for the message.

    A delta in units of the last place has the scale s * 2^-exponent; s is the best of a fine grid.
    """
    keys, counts = np.unique(np.stack([exponents, moved]), axis=1, return_counts=True)
    finest = 2.0 ** (keys[0].astype(np.float64) - keys[0].max())
    return float(
        min(
            (counts * _laplace_bits(keys[1], 2.0 ** (power / 4) / finest)).sum()
            for power in range(-80, 40)
        )
    )


def _laplace_bits(moved: Numbers, scale: NDArray[np.float64]) -> NDArray[np.float64]:
    size = np.abs(moved)
    stays = -np.expm1(-0.5 / scale)
    moves = 0.5 * np.exp(-(np.maximum(size, 1) - 0.5) / scale) * -np.expm1(-1.0 / scale)
    chance = np.where(size == 0, stays, moves)
    floor = 2.0**-16  # an escape with the step behind it
    return -np.log2(np.maximum(chance, floor)) + np.where(chance < floor, 16.0, 0.0)


def payload_bits(codec: Codec, values: Tensor) -> int:
    """Return bits of a codec that uses no reference."""
    room = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    return 8 * codec.encode(values, room)


def step_code_bits(reference: Tensor, values: Tensor) -> int:
    """Return bits of stepcode, header and model included."""
    room = torch.empty(StepCode().wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    return 8 * StepCode().encode(values, reference, room)


@dataclass(frozen=True)
class Compressor:
    """General-purpose compressor: compress and decompress."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def compressors() -> dict[str, Compressor]:
    """Return zstd at levels 1 and 3, from the package zstandard or Python 3.14; otherwise zlib."""
    if find_spec("zstandard") is not None:
        zstandard = import_module("zstandard")
        decompress = zstandard.ZstdDecompressor().decompress
        return {
            f"zstd-{level}": Compressor(zstandard.ZstdCompressor(level=level).compress, decompress)
            for level in (1, 3)
        }
    if find_spec("compression") is not None:  # Python 3.14
        zstd = import_module("compression.zstd")
        return {
            f"zstd-{level}": Compressor(partial(zstd.compress, level=level), zstd.decompress)
            for level in (1, 3)
        }
    levels = {level: partial(zlib.compress, level=level) for level in (1, 6)}
    return {f"zlib-{n}": Compressor(compress, zlib.decompress) for n, compress in levels.items()}


def gaps_and_values(reference: Tensor, values: Tensor) -> bytes:
    """Return the gaps between changed values, one byte each where they fit, then the new values.

    A gap of 255 or more takes a byte of 255 plus four bytes, as in published delta formats.
    """
    old, new = _patterns(reference), _patterns(values)
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    short = np.minimum(gaps, 255).astype(np.uint8).tobytes()
    long = gaps[gaps >= 255].astype(np.uint32).tobytes()
    return b"".join((short, long, _halves(new[places])))


def _halves(bits: Numbers) -> bytes:
    return bits.astype(np.uint16).tobytes()


def sent(reference: Tensor, values: Tensor) -> dict[str, float]:
    """Return bits per value of every encoding, by name."""
    exponents, moved = steps(reference, values)
    differs = _patterns(reference) ^ _patterns(values)
    changed = int((differs != 0).sum())
    change = (values.view(torch.int16) - reference.view(torch.int16)).view(torch.bfloat16)
    bits: dict[str, float] = {
        "entropy": entropy_bits(exponents, moved),
        "stepcode": step_code_bits(reference, values),
        "static model": static_bits(exponents, moved),
        "short codes": short_code_bits(exponents, moved),
        "int32 + bf16": 48 * changed,
    }
    gaps, masked = gaps_and_values(reference, values), _halves(differs)
    for name, one in compressors().items():
        bits[f"gaps, {name}"] = 8 * len(one.compress(gaps))
        bits[f"xor, {name}"] = 8 * len(one.compress(masked))
    bits["mpc of differences"] = payload_bits(make_codec("mpc"), change)
    bits["expcode"] = payload_bits(make_codec("expcode"), values)
    bits["raw"] = 16 * values.numel()
    return {"changed": changed / values.numel()} | {
        name: total / values.numel() for name, total in bits.items()
    }
