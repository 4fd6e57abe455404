"""Values for codec tests: every kind of array that a codec may meet."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from hybridcomp.codecs import Codec
from tests.selection import VARIABLE

Floats = NDArray[np.float32]
Generator = np.random.Generator

MAX = np.finfo(np.float32).max


def _sparse(rng: Generator, n: int) -> Floats:
    values = rng.standard_normal(n)
    values[rng.random(n) < 0.9] = 0
    return values.astype(np.float32)


def _outliers(rng: Generator, n: int) -> Floats:
    values = rng.standard_normal(n)
    values[rng.random(n) < 0.05] *= 1e6
    return values.astype(np.float32)


def _wide(rng: Generator, n: int) -> Floats:
    signs = rng.choice([-1.0, 1.0], n)
    return np.asarray(signs * 10.0 ** rng.uniform(-38, 38, n), np.float32)


def _bits(rng: Generator, n: int) -> Floats:
    return rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def _nonfinite(rng: Generator, n: int) -> Floats:
    values = rng.standard_normal(n).astype(np.float32)
    payloads = np.array([0x7FC00000, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000], np.uint32)
    where = rng.random(n) < rng.choice([0.002, 0.1])
    values.view(np.uint32)[where] = rng.choice(payloads, n)[where]
    return values


def _subnormal(rng: Generator, n: int) -> Floats:
    signs = rng.choice(np.array([0, 1 << 31], np.uint32), n)
    bits = rng.integers(0, 2**24, n, dtype=np.uint32) | signs
    return np.asarray(bits.view(np.float32))


def _near_max(rng: Generator, n: int) -> Floats:
    values = MAX * rng.choice([1.0, -1.0, 0.97, 0.5, 0.001], n)
    return np.asarray(values, np.float32)


def _drift(rng: Generator, n: int) -> Floats:
    return np.asarray(rng.standard_normal(n) * 2.0 ** -np.arange(n, dtype=float), np.float32)


KINDS: dict[str, Callable[[Generator, int], Floats]] = {
    "normal": lambda rng, n: rng.standard_normal(n, dtype=np.float32),
    "walk": lambda rng, n: np.cumsum(rng.standard_normal(n)).astype(np.float32),
    "zeros": lambda rng, n: np.zeros(n, np.float32),
    "minus zeros": lambda rng, n: np.full(n, -0.0, np.float32),
    "constant": lambda rng, n: np.full(n, rng.standard_normal(), np.float32),
    "sparse": _sparse,
    "outliers": _outliers,
    "small": lambda rng, n: (rng.standard_normal(n) * 1e-12).astype(np.float32),
    "tiny": lambda rng, n: (rng.standard_normal(n) * 2.0**-109).astype(np.float32),
    "wide": _wide,
    "falling": _drift,
    "subnormal": _subnormal,
    "near max": _near_max,
    "nonfinite": _nonfinite,
    "all nan": lambda rng, n: np.full(n, np.nan, np.float32),
    "bits": _bits,
}

#: kinds that differ most for codecs
DAY = ("normal", "minus zeros", "outliers", "nonfinite")
#: hypothesis and other sweeps run four times as many cases at night
NIGHTLY = os.environ.get(VARIABLE) == "1"
LENGTHS = (0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 255, 257, 1000, 1023, 1024, 1025, 2048, 4097, 5000)


def make(kind: str, n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``n`` values of ``kind``; for "bits" 16-bit dtypes get random bit patterns."""
    rng = np.random.default_rng(seed)
    if kind == "bits" and dtype != torch.float32:
        bits = rng.integers(-(2**15), 2**15, n, dtype=np.int16)
        return torch.from_numpy(bits).view(dtype)
    return torch.from_numpy(KINDS[kind](rng, n).copy()).to(dtype)


def encoded(codec: Codec, values: Tensor) -> Tensor:
    """Return the payload, encoded into a dirty buffer."""
    room = torch.full((codec.wire_nbytes(values.numel(), values.dtype),), 0xA5, dtype=torch.uint8)
    return room[: codec.encode(values, room)]


def decoded(codec: Codec, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``values`` encoded and decoded to ``dtype``."""
    out = torch.empty(values.numel(), dtype=dtype)
    codec.decode(encoded(codec, values), out)
    return out


def bits_of(values: Tensor) -> Tensor:
    """Return the bit patterns, which compare equal even for NaN."""
    return values.view(torch.int32 if values.itemsize == 4 else torch.int16)


def often(examples: int) -> settings:
    """Return the settings of a test of so many examples by day."""
    return settings(max_examples=examples * (4 if NIGHTLY else 1))


def tensors(
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    kinds: tuple[str, ...] = tuple(KINDS),
) -> st.SearchStrategy[Tensor]:
    """Draw tensors of all kinds and lengths, and short ones with hypothesis' elements."""
    made = st.builds(
        make,
        st.sampled_from(kinds),
        st.one_of(st.sampled_from(LENGTHS), st.integers(0, 1100)),
        st.integers(0, 2**31),
        st.sampled_from(dtypes),
    )
    allow = "bits" in kinds
    elements = st.floats(width=32, allow_nan=allow, allow_infinity=allow)
    picked = st.builds(
        lambda values, dtype: torch.tensor(values, dtype=torch.float32).to(dtype),
        st.lists(elements, max_size=70),
        st.sampled_from(dtypes),
    )
    return st.one_of(made, picked)
