"""Slow, simple expcode: the oracle for the bytes of kernels/formats/expcode.h."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.codecs.reference import _fields, _place, padded

TILE = 2048


@dataclass(frozen=True)
class Format:
    """A float format: its code in the header, bits, exponent bits."""

    code: int
    item: int
    exponent: int

    @property
    def rest(self) -> int:
        """Return the bits of sign and mantissa."""
        return self.item - self.exponent

    def slot(self, index: int) -> int:
        """Return the position of a value's byte."""
        if self.item == 32:
            return 4 * (index % 8) + index // 8
        return 2 * (index % 16) + index // 16


FORMATS = {
    torch.float32: Format(0, 32, 8),
    torch.bfloat16: Format(1, 16, 8),
    torch.float16: Format(2, 16, 5),
}


@dataclass(frozen=True)
class Dictionary:
    """The exponents that have a code."""

    width: int
    exponents: tuple[int, ...]  # by code
    base: int = 0
    zero: bool = False


def dictionary_of(form: Format, width: int, base: int, zero: bool) -> Dictionary:
    """Return a window's dictionary."""
    if width == form.exponent:
        return Dictionary(width, tuple(range(2**width)))
    window = [e % 256 for e in range(base, base + 2**width - 1 - zero)]
    return Dictionary(width, tuple([*window, 0] if zero else window), base, zero)


def choose(form: Format, sample: list[int]) -> Dictionary:
    """Return the cheapest dictionary for a sample of exponents."""
    counts, total = Counter(sample), len(sample)
    best, least = dictionary_of(form, form.exponent, 0, False), form.exponent * total
    for zero in (False, True):
        if zero and not counts[0]:
            continue
        for width in (2, 3, 4):
            for base in range(max(min(sample), zero), max(sample) + 1):
                found = dictionary_of(form, width, base, zero)
                window = range(base, base + 2**width - 1 - zero)
                covered = sum(counts[e] for e in window) + zero * counts[0]
                cost = width * total + 8 * (total - covered)
                if cost < least or (cost == least and best.width == form.exponent):
                    best, least = found, cost
    return best


def pack(levels: list[int], bits: int) -> bytes:
    """Pack 32 levels as blockint does, given by slot."""
    words = np.zeros(bits, np.uint32)
    for width, shift, first in _fields(bits):
        for slot, level in enumerate(levels):
            byte, k = slot % 4, slot // 4
            word, bit = _place(8 * byte + k, width)
            words[first + word] |= np.uint32((level >> shift & (2**width - 1)) << bit)
    return words.tobytes()


def encode_block(
    form: Format, turned: list[int], found: Dictionary, no_halves: bool
) -> tuple[bytes, bytes]:
    """Return (block, escapes)."""
    rest = bytearray(32)
    halves, levels, exponents = [0] * 32, [0] * 32, [0] * 32
    codes = {e: code for code, e in reversed(list(enumerate(found.exponents)))}
    if found.zero:
        codes[0] = 2**found.width - 2
    escape = 2**found.width - 1
    escaped = [False] * 32
    for i, r in enumerate(turned):
        slot, exponent = form.slot(i), r >> form.rest
        exponents[slot] = exponent
        escaped[slot] = exponent not in codes
        levels[slot] = codes.get(exponent, escape)
        rest[slot] = (r >> 16 if form.item == 32 else r) & 255
        halves[16 * (i // 16) + 2 * (i % 8) + i // 8 % 2] = r & 0xFFFF
        if form.rest % 8:
            levels[slot] += (r >> 8 & 7) << found.width
    packed = pack(levels, found.width + form.rest % 8)
    low = struct.pack("<32H", *halves) if form.item == 32 and not no_halves else b""
    return bytes(rest) + packed + low, bytes(
        e for e, lost in zip(exponents, escaped, strict=True) if lost
    )


def turn(form: Format, bits: int) -> int:
    """Rotate the exponent to the top."""
    sign, mantissa = bits >> (form.item - 1), bits & (1 << (form.rest - 1)) - 1
    exponent = bits >> (form.rest - 1) & (1 << form.exponent) - 1
    if form.item == 32:
        return exponent << 24 | sign << 23 | mantissa
    return exponent << form.rest | mantissa << 1 | sign


def encode_tile(form: Format, values: list[int]) -> bytes:
    """Return a tile's bytes, given its values' bits."""
    values = values + [values[-1]] * (-len(values) % 32)
    blocks = [values[i : i + 32] for i in range(0, len(values), 32)]
    present = [any(block) for block in blocks]
    there = [[turn(form, v) for v in block] for block in blocks if any(block)]
    if not there:
        return b""
    no_halves = form.item == 32 and not any(v & 0xFFFF for v in values)
    sample = there[:: max(1, len(there) // 8)][:8]
    found = choose(form, [r >> form.rest for block in sample for r in block])
    encoded = [encode_block(form, block, found, no_halves) for block in there]
    if sum(len(e) for _, e in encoded) >= 4 * (form.exponent - found.width) * len(there):
        found = dictionary_of(form, form.exponent, 0, False)
        encoded = [encode_block(form, block, found, no_halves) for block in there]
    escapes = b"".join(e for _, e in encoded)
    masked = not all(present)
    flags = found.width + 16 * masked + 32 * found.zero + 64 * no_halves
    out = struct.pack("<BBH", found.base, flags, len(escapes))
    if masked:
        out += np.packbits(np.array(present), bitorder="little").tobytes()
    out += b"".join(block for block, _ in encoded) + escapes
    return out + bytes(-len(out) % 4)


def encode(values: Tensor) -> bytes:
    """Return the payload."""
    if values.numel() == 0:
        return b""
    form = FORMATS[values.dtype]
    kind, unsigned = (torch.int32, np.uint32) if form.item == 32 else (torch.int16, np.uint16)
    bits = values.view(kind).numpy().view(unsigned).tolist()
    tiles = [encode_tile(form, bits[i : i + TILE]) for i in range(0, len(bits), TILE)]
    offsets = np.cumsum([0] + [len(tile) // 4 for tile in tiles])
    head = struct.pack(
        "<IBBHQIIII", 0x58454348, 1, form.code, 0, len(bits), TILE, 0, offsets[-1], 0
    )
    return padded(head + offsets[:-1].astype("<u4").tobytes() + b"".join(tiles))
