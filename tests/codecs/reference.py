"""Slow, simple versions of the formats: the kernels' oracles."""

from __future__ import annotations

import numpy as np
import zfpy
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Flags = NDArray[np.bool_]
F = np.float32


def padded(stream: bytes) -> bytes:
    """Return the payload of a stream: zero-padded to a multiple of 16 bytes."""
    return stream + bytes(-len(stream) % 16)


# blockint: kernels/formats/blockint.h


def _fields(bits: int) -> list[tuple[int, int, int]]:
    """Return (width, shift in the level, first word) of a level's fields."""
    fields, word, left = [], 0, bits
    for width in (8, 4, 2, 1):
        if bits & width:
            left -= width
            fields.append((width, left, word))
            word += width
    return fields


def _place(index: int, width: int) -> tuple[int, int]:
    """Return (word, bit) of value ``index`` in a field of ``width`` bits."""
    byte, k = divmod(index, 8)
    return k % width, 8 * byte + width * (k // width)


def _blocks(values: Floats) -> Floats:
    count = -(-len(values) // 32)
    blocks = np.zeros(count * 32, F)
    blocks[: len(values)] = values
    return blocks.reshape(count, 32)


def half_top_of(code: int, base: int) -> np.float32:
    """Return T / 2 of a block, T = (1 + mantissa / 16) * 2^exponent."""
    exponent, mantissa = divmod(16 * base + 15 - code, 16)
    return F((1 + mantissa / 16) * 2.0 ** (exponent - 128))  # exponent is biased by 127


def _signs() -> Floats:
    """Return the diagonal D of kernels/formats/rotation.h."""
    return np.array([-1 if 0x9E3779B97F4A7C15 >> i & 1 else 1 for i in range(64)], F)


def _hadamard(groups: Floats) -> Floats:
    """Apply H to each row of 64, neighbouring pairs first."""
    x = groups.copy()
    for stage in range(6):
        x = x.reshape(len(groups), 32 >> stage, 2, 2**stage)
        x = np.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], axis=2)
    return x.reshape(len(groups), 64)


def rotated(values: Floats) -> Floats:
    """Return H D x / 64 of every whole group of 64 values; the rest unchanged."""
    whole, out = len(values) // 64 * 64, values.copy()
    with np.errstate(invalid="ignore"):
        out[:whole] = _hadamard(values[:whole].reshape(-1, 64) * _signs() * F(1 / 64)).reshape(-1)
    return out


def rotated_back(values: Floats) -> Floats:
    """Return D H y of every whole group of 64 values; overflow becomes the largest float."""
    whole, out = len(values) // 64 * 64, values.copy()
    with np.errstate(over="ignore"):
        x = _hadamard(values[:whole].reshape(-1, 64) * F(1 / 128)) * _signs() * F(128)
    out[:whole] = np.clip(x, -np.finfo(F).max, np.finfo(F).max).reshape(-1)
    return out


def _gaussian_levels(scaled: Floats) -> list[int]:
    """Return the level of each value of at most 1."""
    square = scaled * scaled
    cell = scaled * ((square * F(2.1503) - F(4.5472)) * square + F(10.3521))
    return [int(level) for level in np.rint(cell - F(0.5)) + 8]


def _gaussian_value(level: int) -> np.float32:
    j = F(2 * level - 15)
    return F(j * (j * j * F(6.594e-5) + F(0.04768)))


#: extra squared error of a value under the first scale, by magnitude in 4 / 127 of its top
_LLOYD_GAINS = (
    0, 2, 6, -2, -6, 15, 1, -14, 14, 14, -9, -29, 36, 21, -12, -44,
    17, 54, 11, -32, -72, 26, 89, 33, -22, -78, -102, 79, 127, 58, -22, -72,
)  # fmt: skip


def _lloyd_fine(block: Floats, half_top: np.float32) -> Floats:
    """Return each value in 127ths of its block's top."""
    fine: Floats = np.rint(block * (F(63.5) / half_top))
    return fine


def lloyd_code(block: Floats, code: int, base: int) -> int:
    """Return the code to send with a block: that of its top or the next below."""
    fine = _lloyd_fine(block, half_top_of(code, base))
    gain = sum(_LLOYD_GAINS[int(abs(one)) // 4] for one in fine)
    return code + (gain > 0 and code < 253)


def lloyd_levels(block: Floats, half_top: np.float32, sent: np.float32) -> list[int]:
    """Return levels under the sent top, which may be the next below the block's top."""
    share = half_top / sent * (F(1) / F(127)) if sent != half_top else F(1) / F(127)
    x = np.clip(_lloyd_fine(block, half_top) * share, F(-1), F(1))
    square = x * x
    cell = x * ((square * F(2.44921) - F(4.88653)) * square + F(9.74921))
    return [int(level) for level in np.rint(cell) + 8]


def _lloyd_value(level: int) -> np.float32:
    k = F(level - 8)
    return F(k * (k * k * F(7.925e-4) + F(0.10026)))


def lloyd_values(code: int, base: int) -> Floats:
    """Return the fifteen decoded levels of a scale."""
    values = [_lloyd_value(level) * half_top_of(code, base) * F(2) for level in range(1, 16)]
    return np.array(values, F)


def _random_bits(value: np.float32, index: int, inverse: np.float32) -> int:
    """Return 14 random bits, see kernels/formats/dither.h."""
    seed = index * 0x9E3779B9 + int(inverse.view(np.uint32))
    word = int(value.view(np.uint32)) ^ seed % 2**32
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    return ((word ^ word >> 15) * 0x846CA68B % 2**32) >> 18


def _levels(
    block: Floats, first: int, half_top: np.float32, bits: int, spacing: str, random: bool
) -> list[int]:
    """Return a block's levels; ``first``: index of its first value in the message."""
    if spacing == "gaussian":
        return _gaussian_levels(block * (F(0.5) / half_top))
    inverse, offset = F((2 ** (bits - 1) - 1) / 2) / half_top, 2 ** (bits - 1)
    if not random:
        return [int(level) for level in np.rint(block * inverse) + offset]
    fine = np.rint(np.float64(block * inverse) * 2**14)  # in units of 2^-14 of a step
    drawn = [_random_bits(value, first + index, inverse) for index, value in enumerate(block)]
    return [(int(one) + more) // 2**14 + offset for one, more in zip(fine, drawn, strict=True)]


def blockint_encode(
    values: Floats, bits: int, rotate: bool = False, spacing: str = "uniform", random: bool = False
) -> bytes:
    """Return blockint's payload."""
    blocks = _blocks(rotated(values) if rotate else values)
    absmax = np.abs(blocks).max(axis=1, initial=0)
    finite: Flags = np.asarray(np.isfinite(blocks).all(axis=1))
    tops = (absmax.view(np.uint32).astype(np.int64) + 0x7FFFF) >> 19
    bases = [
        max(32, int(np.where(finite, tops, 0)[t : t + 32].max()) >> 4)
        for t in range(0, len(blocks), 32)
    ]
    codes, words = [], np.zeros((len(blocks), bits), np.uint32)
    for number, block in enumerate(blocks):
        if not finite[number]:
            codes.append(255)
            continue
        base = bases[number // 32]
        code = min(253, 16 * base + 15 - int(tops[number]))
        half_top = half_top_of(code, base)
        if spacing == "lloyd":
            code = lloyd_code(block, code, base)
            levels = lloyd_levels(block, half_top, half_top_of(code, base))
        else:
            levels = _levels(block, 32 * number, half_top, bits, spacing, random)
        codes.append(254 if spacing == "gaussian" and absmax[number] == 0 else code)
        assert min(levels) >= (spacing != "gaussian") and max(levels) <= 2**bits - 1
        for width, shift, first in _fields(bits):
            for index, level in enumerate(levels):
                word, bit = _place(index, width)
                field = (level >> shift) & (2**width - 1)
                words[number, first + word] |= np.uint32(field << bit)
    return padded(words.tobytes() + bytes(codes) + bytes(bases))


def _relative(level: int, bits: int, spacing: str) -> np.float32:
    if spacing == "uniform":
        return F(level - 2 ** (bits - 1))
    return _gaussian_value(level) if spacing == "gaussian" else _lloyd_value(level)


def blockint_decode(
    payload: bytes, numel: int, bits: int, rotate: bool = False, spacing: str = "uniform"
) -> Floats:
    """Return the values of a blockint payload."""
    blocks, tiles = -(-numel // 32), -(-numel // 1024)
    words = np.frombuffer(payload, np.uint32, blocks * bits).reshape(blocks, bits)
    codes = payload[blocks * 4 * bits :][:blocks]
    bases = payload[blocks * (4 * bits + 1) :][:tiles]
    out = np.zeros((blocks, 32), F)
    for number in range(blocks):
        code, base = codes[number], bases[number // 32]
        if code == 255 or (spacing == "gaussian" and code == 254):
            out[number] = np.nan if code == 255 else 0
            continue
        half_step = half_top_of(code, base) * (
            F(1) / F(2 ** (bits - 1) - 1) if spacing == "uniform" else F(1)
        )
        for index in range(32):
            level = 0
            for width, shift, first in _fields(bits):
                word, bit = _place(index, width)
                field = (int(words[number, first + word]) >> bit) & (2**width - 1)
                level |= field << shift
            relative = _relative(level, bits, spacing)
            with np.errstate(over="ignore"):
                value = relative * half_step * F(2)
            out[number, index] = np.clip(value, -np.finfo(F).max, np.finfo(F).max)
    flat = out.reshape(-1)[:numel]
    return rotated_back(flat) if rotate else flat


# mpc: kernels/formats/mpc.h; fp32 is the study's model of v1.2


def _transpose(words: Words) -> Words:
    """Transpose each 32 words as a 32 x 32 bit matrix."""
    bits = np.unpackbits(words.view(np.uint8).reshape(-1, 32, 4), axis=2, bitorder="little")
    turned = np.packbits(bits.transpose(0, 2, 1), axis=2, bitorder="little")
    return np.ascontiguousarray(turned).view(np.uint32).reshape(words.shape)


def mpc_encode(words: Words, numel: int, dim: int, dtype: int) -> bytes:
    """Return mpc's payload of 32-bit words."""
    if numel == 0:
        return b""
    count, chunks = len(words), -(-len(words) // 1024)
    flat = np.zeros(chunks * 1024, np.uint32)
    flat[:count] = words
    x = flat.reshape(chunks, 1024)
    r = x.copy()
    r[:, dim:] -= x[:, :-dim]
    r.reshape(-1)[count:] = 0
    t = _transpose(r)
    d = t.copy()
    d[:, 1:] -= t[:, :-1]
    kept = d.reshape(-1) != 0
    groups = -(-count // 32)
    bitmap = np.packbits(kept[: groups * 32], bitorder="little").view(np.uint32)
    head = np.array([0x63706D00 + 32 * dtype + dim - 1, numel], np.uint32)
    return padded(np.concatenate([head, bitmap, d.reshape(-1)[kept]]).tobytes())


# zfp: the library itself, around the blocks that it cannot encode


def zfp_special(values: Floats) -> tuple[Flags, Flags]:
    """Return per block of 4: holds a NaN or Inf; too small for zfp's scale."""
    flat = np.zeros(-(-len(values) // 4) * 4, F)
    flat[: len(values)] = values
    blocks = flat.reshape(-1, 4)
    lost: Flags = np.asarray(~np.isfinite(blocks).all(axis=1))
    return lost, ~lost & (np.abs(blocks).max(axis=1, initial=0) < 2.0**-98)


def zfp_encode(values: Floats, rate: float) -> bytes:
    """Return zfpy's stream with the blocks replaced that kernels/formats/zfp.h treats specially."""
    if len(values) == 0:
        return b""
    lost, tiny = zfp_special(values)
    clean = values.copy()
    clean[np.repeat(lost | tiny, 4)[: len(values)]] = 0
    bits = np.unpackbits(
        np.frombuffer(zfpy.compress_numpy(clean, rate=rate, write_header=False), np.uint8),
        bitorder="little",
    )
    maxbits = int(4 * rate + 0.5)
    bits[np.flatnonzero(lost) * maxbits] = 1
    return padded(np.packbits(bits, bitorder="little").tobytes())


def zfp_decode(values: Floats, rate: float) -> Floats:
    """Return zfpy's decoded values, with the same blocks replaced."""
    if len(values) == 0:
        return values.copy()
    lost, tiny = zfp_special(values)
    clean = values.copy()
    clean[np.repeat(lost | tiny, 4)[: len(values)]] = 0
    out = np.array(zfpy.decompress_numpy(zfpy.compress_numpy(clean, rate=rate)), F)
    out = np.clip(out, -np.finfo(F).max, np.finfo(F).max)
    out[np.repeat(lost, 4)[: len(values)]] = np.nan
    return out
