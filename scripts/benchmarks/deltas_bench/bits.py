"""Count the bits that the deltas of a trace need, and the bits of each encoding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridcomp.codecs import StepCode, make_codec

Numbers = NDArray[np.int64]


def _patterns(values: Tensor) -> Numbers:
    return values.view(torch.int16).numpy().astype(np.int64) & 0xFFFF


def steps(reference: Tensor, values: Tensor) -> tuple[Numbers, Numbers]:
    """Return exponents of the bf16 ``reference``, and deltas to ``values`` as ordered integers."""
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


def payload_bits(codec: Any, *values: Tensor) -> int:
    """Return the bits of a payload; ``stepcode`` takes the values, then the reference."""
    room = torch.empty(codec.wire_nbytes(values[0].numel(), values[0].dtype), dtype=torch.uint8)
    used: int = codec.encode(*values, room)
    return 8 * used


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Return zstd at levels 1 and 3, from the package zstandard or Python 3.14; otherwise zlib."""
    if find_spec("zstandard") is not None:
        zstandard = import_module("zstandard")
        return {f"zstd-{n}": zstandard.ZstdCompressor(level=n).compress for n in (1, 3)}
    if find_spec("compression") is not None:  # Python 3.14
        zstd = import_module("compression.zstd")
        return {f"zstd-{n}": partial(zstd.compress, level=n) for n in (1, 3)}
    return {f"zlib-{n}": partial(zlib.compress, level=n) for n in (1, 6)}


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
        "stepcode": payload_bits(StepCode(), values, reference),
        "int32 + bf16": 48 * changed,
    }
    gaps, masked = gaps_and_values(reference, values), _halves(differs)
    for name, compress in compressors().items():
        bits[f"gaps, {name}"] = 8 * len(compress(gaps))
        bits[f"xor, {name}"] = 8 * len(compress(masked))
    bits["mpc of differences"] = payload_bits(make_codec("mpc"), change)
    bits["expcode"] = payload_bits(make_codec("expcode"), values)
    bits["raw"] = 16 * values.numel()
    return {"changed": changed / values.numel()} | {
        name: total / values.numel() for name, total in bits.items()
    }
