"""Slow stepcode decoder, written from the format's text alone; pairs of values for its tests."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.codecs import arrays

LANES, CONTEXTS, TOTAL, ESCAPE = 32, 16, 4096, 102
STORED = 0xFFFFFFFF

Bits = list[int]
Model = list[list[tuple[int, int, int]]]


def step_of(symbol: int, bits: int) -> int:
    """Return the delta of a symbol and its extra bits."""
    if symbol == ESCAPE:
        return bits
    if symbol < 32:
        z = symbol
    elif symbol < 72:
        k, lead = (symbol - 32) // 4 + 5, 4 + (symbol - 32) % 4
        z = lead << (k - 2) | bits
    elif symbol < 74:
        z = symbol - 72
    else:
        k, lead = (symbol - 74) // 2 + 1, 2 + (symbol - 74) % 2
        z = lead << (k - 1) | bits
    d = -(z + 1) // 2 if z % 2 else z // 2
    return (0x8000 if symbol >= 72 else 0) | d % 0x8000


def extra_count(symbol: int) -> int:
    """Return a symbol's number of extra bits."""
    if symbol == ESCAPE:
        return 16
    if symbol < 32 or symbol in (72, 73):
        return 0
    return (symbol - 32) // 4 + 3 if symbol < 72 else (symbol - 74) // 2


def read_model(data: bytes) -> Model:
    """Return (symbol, start, frequency) of each context."""
    model: Model = []
    at = 0
    for _ in range(CONTEXTS):
        number = data[at]
        listed = [struct.unpack_from("<BH", data, at + 1 + 3 * i) for i in range(number)]
        at += 1 + 3 * number
        listed = listed or [(0, TOTAL - 1)]
        listed.append((ESCAPE, TOTAL - sum(frequency for _, frequency in listed)))
        start, row = 0, []
        for symbol, frequency in listed:
            row.append((symbol, start, frequency))
            start += frequency
        model.append(row)
    assert at <= len(data) < at + 4
    return model


def decode(payload: bytes, reference: Bits, dtype: int) -> Bits:
    """Return the bit patterns of a payload, given its reference."""
    magic, version, kind, mode, lowest, numel = struct.unpack_from("<4sBBBBQ", payload)
    tile, length, size, zero = struct.unpack_from("<4I", payload, 16)
    assert (magic, version, kind, numel, zero) == (b"hcst", 1, dtype, len(reference), 0)
    if mode == 1:
        return list(struct.unpack_from(f"<{numel}H", payload, 32))
    assert mode == 0
    model, tiles = read_model(payload[32 : 32 + size]), -(-numel // tile)
    offsets = struct.unpack_from(f"<{tiles}I", payload, 32 + size)
    data, out = 32 + size + 4 * tiles, []
    for begin, end, first in zip(
        offsets, (*offsets[1:], length), range(0, numel, tile), strict=True
    ):
        old = reference[first : first + tile]
        out += _tile(payload[data + 4 * begin : data + 4 * end], old, model, lowest, dtype)
    return out


def _tile(data: bytes, old: Bits, model: Model, lowest: int, dtype: int) -> Bits:
    if not data:
        return old
    (number,) = struct.unpack_from("<I", data)
    if number == STORED:
        return list(struct.unpack_from(f"<{len(old)}H", data, 4))
    states = list(struct.unpack_from("<32I", data, 4))
    words = list(struct.unpack_from(f"<{number}H", data, 132))
    extra = int.from_bytes(data[132 + -(-number // 2) * 4 :], "little")
    out = []
    for i, bits in enumerate(old):
        exponent = (bits & 0x7FFF) >> (7 if dtype == 1 else 10)
        context = min(max(exponent - lowest, 0), CONTEXTS - 1)
        state, lane = states[i % LANES], i % LANES
        symbol, start, frequency = next(
            row for row in model[context] if row[1] <= state % TOTAL < row[1] + row[2]
        )
        state = frequency * (state // TOTAL) + state % TOTAL - start
        if state < 1 << 16:
            state = state << 16 | words.pop(0)
        states[lane] = state
        count = extra_count(symbol)
        step = step_of(symbol, extra & ((1 << count) - 1))
        extra >>= count
        out.append((bits ^ step) & 0x8000 | (bits + step) & 0x7FFF)
    assert not words and not extra and states == [1 << 16] * LANES
    return out


def patterns(values: Tensor) -> Bits:
    """Return bit patterns as numbers from 0 to 65535."""
    found: Bits = values.view(torch.int16).numpy().view(np.uint16).tolist()
    return found


def _moved(share: float, ulps: int) -> Callable[[np.random.Generator, Tensor], Tensor]:
    def move(rng: np.random.Generator, bits: Tensor) -> Tensor:
        steps = rng.integers(-ulps, ulps + 1, len(bits)) * (rng.random(len(bits)) < share)
        return bits + torch.from_numpy(steps.astype(np.int16))  # wraps around

    return move


#: ways to derive the values' bits from the reference's
CHANGES: dict[str, Callable[[np.random.Generator, Tensor], Tensor]] = {
    "nothing": lambda rng, bits: bits.clone(),
    "few": _moved(0.02, 1),
    "many": _moved(0.7, 4),
    "far": _moved(0.9, 3000),
    "one": lambda rng, bits: torch.where(torch.arange(len(bits)) == len(bits) // 2, bits + 1, bits),
    "signs": lambda rng, bits: bits ^ torch.from_numpy(
        (rng.random(len(bits)) < 0.1).astype(np.int16) << 15
    ),
    "everything": lambda rng, bits: torch.from_numpy(
        rng.integers(-(2**15), 2**15, len(bits), dtype=np.int16)
    ),
}  # fmt: skip


def pair(
    kind: str, change: str, numel: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return values and reference: a kind of ``arrays``, changed."""
    reference = arrays.make(kind, numel, seed, dtype)
    bits = CHANGES[change](np.random.default_rng(seed + 1), reference.view(torch.int16))
    return bits.view(dtype), reference
