"""Slow, simple radix: the oracle for bytes and values of formats/radix.h."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.codecs.reference import padded

Floats = NDArray[np.float32]
F = np.float32
RAW = 45
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: explicit mantissa bits and the smallest biased fp32 exponent of the 16-bit dtypes
NARROW = {torch.bfloat16: (7, 1), torch.float16: (10, 113)}
LARGEST = float(np.finfo(F).max)


def _odd_root(bits: int, power: int) -> int:
    """Return the largest odd number whose ``power``-th power is at most 2^bits."""
    root = int(2 ** (bits / power)) + 2
    while root**power > 2**bits or root % 2 == 0:
        root -= 1
    return root


#: class -> (words, bits, levels)
CLASSES = (
    [(4, bits, _odd_root(bits, 4)) for bits in (7, 10, *range(12, 33))]
    + [(8, bits, _odd_root(bits, 2)) for bits in range(17, 33)]
    + [(16, bits, 2**bits - 1) for bits in range(17, 23)]
)


@dataclass(frozen=True)
class Settings:
    """The codec's arguments, the bound as fp32."""

    bound: float
    segment: int = 4096
    relative: bool = True


def round_to(values: Floats, dtype: torch.dtype) -> Floats:
    """Round ``values`` to ``dtype``, clamping finite overflow; returned as fp32."""
    if dtype == torch.float32:
        return values
    limit = torch.finfo(dtype).max
    floats = torch.from_numpy(np.atleast_1d(values))
    floats = torch.where(floats.isfinite(), floats.clamp(-limit, limit), floats)
    return floats.to(dtype).float().numpy()


def limit_of(values: Floats, settings: Settings) -> np.float32:
    """Return E: a segment's bound, rounded down to fp32."""
    if not settings.relative:
        return F(settings.bound)
    exact = settings.bound * float(_absmax(values))  # 24 bits times 24 bits
    limit = F(exact)
    return limit if float(limit) <= exact else np.nextafter(limit, F(0))


def _absmax(values: Floats) -> np.float32:
    finite = np.abs(values[np.isfinite(values)])
    return F(finite.max(initial=0))


def step_of(
    values: Floats, settings: Settings, dtype: torch.dtype
) -> tuple[np.float32, np.float32]:
    """Return (step, inverse) of a segment."""
    limit, absmax = limit_of(values, settings), _absmax(values)
    half = limit
    if dtype in NARROW:
        mantissa, lowest = NARROW[dtype]
        exponent = int(absmax.view(np.uint32)) >> 23
        while exponent >= lowest and exponent > mantissa:
            unit = F(2.0 ** (exponent - mantissa - 127))
            if limit >= 4096 * unit:
                break
            half = min(half, (F(math.floor(limit / unit)) + F(0.5)) * unit)
            exponent -= 1
    half = max(half - absmax * F(2.0**-22), half * F(0.5))
    step = F(2) * min(half, F(8.5e37))
    return step, F(1) / step if step >= F(2.0**-120) else F(np.inf)


def class_of(block: Floats, inverse: np.float32) -> int:
    """Return the class that a block needs, RAW if none suffices."""
    scaled = np.abs(block).max() * inverse
    if not scaled < 2097151:
        return RAW
    top = int(np.rint(scaled))
    return next((c for c, (_, _, levels) in enumerate(CLASSES) if levels >= 2 * top + 1), RAW)


def words_of(block: Floats, step: np.float32, inverse: np.float32, cls: int) -> list[int]:
    """Return the base-L words of a block."""
    count, _, levels = CLASSES[cls]
    digits = [int(d) + levels // 2 for d in np.rint(block * inverse)]
    return [sum(d * levels**k for k, d in enumerate(digits[j::count])) for j in range(count)]


def decoded_block(words: list[int], step: np.float32, cls: int) -> Floats:
    """Return the values of the words."""
    count, _, levels = CLASSES[cls]
    digits = [words[i % count] // levels ** (i // count) % levels for i in range(16)]
    with np.errstate(over="ignore"):
        return np.array([F(d - levels // 2) * step for d in digits], F)


def _keeps(block: Floats, decoded: Floats, limit: np.float32) -> bool:
    return bool((np.abs(decoded - block) < limit).all())


def encode_block(
    block: Floats, raw: list[int], limit: np.float32, step: tuple[np.float32, np.float32],
    dtype: torch.dtype,
) -> tuple[int, list[int]] | None:  # fmt: skip
    """Return (class, words) of a block, None if it is zero."""
    finite = bool(np.isfinite(block).all())
    if finite and np.abs(block).max() <= limit:
        return None
    cls = class_of(block, step[1]) if finite else RAW
    raw_bits = 32 if dtype == torch.float32 else 16
    if cls == RAW or CLASSES[cls][0] * CLASSES[cls][1] >= 16 * raw_bits:
        return RAW, raw
    words = words_of(block, *step, cls)
    decoded = decoded_block(words, step[0], cls)
    kept = _keeps(block, decoded, limit) and _keeps(block, round_to(decoded, dtype), limit)
    return (cls, words) if kept else (RAW, raw)


def _bytes_of(bits: list[int]) -> bytes:
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def _low_bits(number: int, count: int) -> list[int]:
    return [number >> k & 1 for k in range(count)]


def encode_tile(values: Floats, raws: list[int], settings: Settings, dtype: torch.dtype) -> bytes:
    """Return the bytes of a segment."""
    raw_bits = 32 if dtype == torch.float32 else 16
    limit, step = limit_of(values, settings), step_of(values, settings, dtype)
    blocks = [
        encode_block(values[i : i + 16], raws[i : i + 16], limit, step, dtype)
        for i in range(0, len(values), 16)
    ]
    there = [block for block in blocks if block]
    if not there:
        return b""
    classes = [cls for cls, _ in there if cls != RAW]
    base, top = min(classes, default=RAW), max(classes, default=RAW)
    some_zero, some_raw = len(there) < len(blocks), 0 < len(classes) < len(there)
    fields = [top + 1 - base if c == RAW and classes else c - base for c, _ in there]
    out = struct.pack("<fBBBB", step[0], base, top - base, some_zero + 2 * some_raw, 0)
    if some_zero:
        out += _bytes_of([block is not None for block in blocks])
    for plane in range((top - base + some_raw).bit_length()):
        out += _bytes_of([field >> plane & 1 for field in fields])
    stream: list[int] = []
    for cls, words in there:
        bits = raw_bits if cls == RAW else CLASSES[cls][1]
        stream += [bit for word in words for bit in _low_bits(word, bits)]
    out += _bytes_of(stream)
    return out + bytes(-len(out) % 4)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def encode(values: Tensor, settings: Settings) -> bytes:
    """Return the payload."""
    numel, dtype = values.numel(), values.dtype
    if numel == 0:
        return b""
    floats = np.zeros(-(-numel // 16) * 16, F)
    floats[:numel] = values.float().numpy()
    raws = np.zeros(len(floats), np.uint32)
    raws[:numel] = values.view(torch.int16 if values.itemsize == 2 else torch.int32).numpy()
    if values.itemsize == 2:
        raws &= 0xFFFF
    tiles = []
    for start in range(0, len(floats), settings.segment):
        here = slice(start, start + settings.segment)
        tiles.append(encode_tile(floats[here], raws[here].tolist(), settings, dtype))
    offsets = np.cumsum([0] + [len(tile) // 4 for tile in tiles])
    head = struct.pack(
        "<IBBBBQIfII", 0x58524348, 1, CODES[dtype], not settings.relative, 0, numel,
        settings.segment, settings.bound, offsets[-1], 0,
    )  # fmt: skip
    data = head + offsets[:-1].astype("<u4").tobytes() + b"".join(tiles)
    return padded(data + bytes(8))


def _read_fields(data: bytes, count: int, planes: int) -> tuple[list[int], bytes]:
    """Return ``count`` numbers of ``planes`` bits, and the bytes after them."""
    size = -(-count // 8)
    rows = np.frombuffer(data, np.uint8, planes * size).reshape(planes, size)
    bits = np.unpackbits(rows, axis=1, bitorder="little")[:, :count]
    numbers = (bits.astype(int) << np.arange(planes)[:, None]).sum(axis=0)
    return numbers.tolist(), data[planes * size :]


def decode_tile(data: bytes, blocks: int, dtype: torch.dtype) -> Iterator[Floats]:
    """Return the blocks of a segment."""
    if not data:
        yield from (np.zeros(16, F) for _ in range(blocks))
        return
    step, base, span, flags, _ = struct.unpack("<fBBBB", data[:8])
    rest, present = data[8:], [1] * blocks
    if flags & 1:
        present, rest = _read_fields(rest, blocks, 1)
    fields, rest = _read_fields(rest, sum(present), (span + (flags >> 1)).bit_length())
    stream = np.unpackbits(np.frombuffer(rest, np.uint8), bitorder="little").astype(np.uint64)
    raw_bits, position, numbers = 32 if dtype == torch.float32 else 16, 0, iter(fields)
    for there in present:
        if not there:
            yield np.zeros(16, F)
            continue
        field = next(numbers)
        cls = RAW if field > span else base + field
        count, bits, _ = (16, raw_bits, 0) if cls == RAW else CLASSES[cls]
        cut = stream[position : position + count * bits].reshape(count, bits)
        words = [int(w) for w in (cut << np.arange(bits, dtype=np.uint64)).sum(axis=1)]
        position += count * bits
        if cls < RAW:
            yield decoded_block(words, F(step), cls)
        elif dtype == torch.float32:
            yield np.array(words, np.uint32).view(F)
        else:
            shorts = torch.from_numpy(np.array(words, np.uint16).view(np.int16))
            yield shorts.view(dtype).float().numpy()


def decode(payload: bytes) -> Floats:
    """Return an encoder's payload decoded to fp32."""
    if not payload:
        return np.zeros(0, F)
    _, _, code, _, _, numel, segment, _, length, _ = struct.unpack("<IBBBBQIfII", payload[:32])
    dtype = next(dtype for dtype, found in CODES.items() if found == code)
    tiles = -(-numel // segment)
    offsets = [*np.frombuffer(payload, "<u4", tiles, 32).astype(int), length]
    data = payload[32 + 4 * tiles :]
    found: list[Floats] = []
    for t in range(tiles):
        blocks = -(-min(segment, numel - t * segment) // 16)
        found += decode_tile(data[4 * offsets[t] : 4 * offsets[t + 1]], blocks, dtype)
    return np.concatenate(found)[:numel]
