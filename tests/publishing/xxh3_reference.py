"""Slow, simple XXH3-128 without a seed, for 241 bytes and more: the kernels' oracle."""

from __future__ import annotations

M32, M64 = 2**32 - 1, 2**64 - 1
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def accumulate(sums: list[int], stripe: bytes, secret: bytes) -> None:
    """Add a stripe of 64 bytes."""
    for lane in range(8):
        data = word(stripe, 8 * lane)
        key = data ^ word(secret, 8 * lane)
        sums[lane ^ 1] = (sums[lane ^ 1] + data) & M64
        sums[lane] = (sums[lane] + (key & M32) * (key >> 32)) & M64


def scramble(sums: list[int]) -> None:
    for lane in range(8):
        mixed = sums[lane] ^ sums[lane] >> 47 ^ word(SECRET, 128 + 8 * lane)
        sums[lane] = mixed * P32[0] & M64


def merged(sums: list[int], secret: bytes, start: int) -> int:
    for pair in range(4):
        left = sums[2 * pair] ^ word(secret, 16 * pair)
        right = sums[2 * pair + 1] ^ word(secret, 16 * pair + 8)
        start += (left * right & M64) ^ (left * right >> 64)
    start &= M64
    start = (start ^ start >> 37) * 0x165667919E3779F9 & M64
    return start ^ start >> 32


def xxh3_128(data: bytes) -> bytes:
    """Return the 16 bytes, as xxHash writes them: high half first, big-endian."""
    assert len(data) > 240, "shorter inputs have other rules"
    sums = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]
    spans = (len(data) - 1) // 1024
    for span in range(spans):
        for stripe in range(16):
            at = 1024 * span + 64 * stripe
            accumulate(sums, data[at : at + 64], SECRET[8 * stripe :])
        scramble(sums)
    for stripe in range((len(data) - 1 - 1024 * spans) // 64):
        at = 1024 * spans + 64 * stripe
        accumulate(sums, data[at : at + 64], SECRET[8 * stripe :])
    accumulate(sums, data[-64:], SECRET[121:])
    low = merged(sums, SECRET[11:], len(data) * P64[0] & M64)
    high = merged(sums, SECRET[117:], ~(len(data) * P64[1]) & M64)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")
