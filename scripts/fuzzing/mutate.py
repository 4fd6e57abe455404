"""Damage payloads for decoders called from Python, as ``mutate.h`` does in C++."""

from __future__ import annotations

import random

ENDS = (0, 1, 2, 3, 0x7F, 0xFF, 0x100, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def tricky(choose: random.Random, length: int) -> int:
    """Return a 32-bit number that length checks often miss: a range's end, or near ``length``."""
    units = length // choose.choice((1, 4))
    numbers = (
        choose.choice(ENDS), units + choose.randint(-4, 4), choose.randrange(units + 1),
        choose.getrandbits(32),
    )  # fmt: skip
    return choose.choice(numbers) % 2**32


def place(choose: random.Random, length: int) -> int:
    """Choose a byte; half of the time among the first 64, the headers."""
    return choose.randrange(length if choose.random() < 0.5 else min(length, 64))


def mutate(choose: random.Random, payload: bytes, other: bytes, multiple: int = 1) -> bytes:
    """Return ``payload`` with one to three damages.

    ``other``: another payload, whose parts may replace parts of ``payload``. ``multiple``: number
    of bytes of which the result's length is a multiple.
    """
    found = bytearray(payload)
    for _ in range(choose.randint(1, 3)):
        if found:
            _once(choose, found, other)
    return bytes(found[: len(found) // multiple * multiple])


def _once(choose: random.Random, found: bytearray, other: bytes) -> None:
    length, kind = len(found), choose.randrange(8)
    at, much = place(choose, length), choose.randint(1, 64)
    if kind == 0:
        for _ in range(choose.randint(1, 16)):
            found[place(choose, length)] ^= 1 << choose.randrange(8)
    elif kind == 1:
        found[at] = tricky(choose, length) & 0xFF
    elif kind in (2, 3):
        at -= at % 4
        word = tricky(choose, length).to_bytes(4, "little")
        found[at : at + 4] = word[: length - at]
    elif kind == 4:
        del found[choose.randrange(length) if choose.random() < 0.5 else -much :]
    elif kind == 5:
        found += choose.randbytes(much)
    elif kind == 6:  # continue with the other message from there
        found[at:] = other[at:length]
    else:
        end = length if choose.random() < 0.25 else min(length, at + much)
        fill = choose.choice((b"\0", b"\xff", choose.randbytes(1)))
        noise = choose.random() < 0.5
        found[at:end] = choose.randbytes(end - at) if noise else fill * (end - at)
