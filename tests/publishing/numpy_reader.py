"""Follow a folder of published 16-bit weights with numpy alone, as the format pages describe."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.publishing.xxh3_reference import xxh3_128


def checksum(data: bytes) -> str:
    """Return XXH3-128, by any library, over those of 1 MiB blocks and the number of bytes."""
    blocks = [data[low : low + 2**20] for low in range(0, len(data), 2**20)]
    each = [xxh3_128(one.ljust(256, b"\0")) for one in blocks]
    return xxh3_128((b"".join(each) + struct.pack("<Q", len(data))).ljust(256, b"\0")).hex()


def expcode(data: bytes) -> Any:
    """Decode 16-bit values that were encoded without a reference."""
    _, _, kind, _, numel, tile, _, length, _ = struct.unpack_from("<IBBHQIIII", data)
    tiles = -(-numel // tile)
    starts = [*struct.unpack_from(f"<{tiles}I", data, 32), length]
    base, rest, out = 32 + 4 * tiles, 8 if kind == 1 else 11, np.zeros(numel, np.uint16)
    slots = 2 * (np.arange(32) % 16) + np.arange(32) // 16
    for number in range(tiles):
        some = data[base + 4 * starts[number] : base + 4 * starts[number + 1]]
        if not some:  # zeros
            continue
        blocks = -(-min(tile, numel - number * tile) // 32)
        first, flags, escapes = struct.unpack_from("<BBH", some)
        width, at, there = flags & 15, 4, list(range(blocks))
        if flags & 16:
            mask = some[4 : 4 + -(-blocks // 8)]
            there, at = [b for b in range(blocks) if mask[b // 8] >> b % 8 & 1], 4 + len(mask)
        bits, values = width + rest % 8, np.zeros((blocks, 32), np.uint16)
        lost = at + len(there) * (32 + 4 * bits)
        for block in there:
            words = struct.unpack_from(f"<{bits}I", some, at + 32)
            r = np.zeros(32, np.uint32)
            for slot in range(32):
                byte, k = slot % 4, slot // 4
                level, word, left = 0, 0, bits
                for field in (size for size in (8, 4, 2, 1) if bits & size):
                    left -= field
                    piece = words[word + k % field] >> 8 * byte + field * (k // field)
                    level, word = level | (piece & 2**field - 1) << left, word + field
                code, most = level & 2**width - 1, 2**width - 1
                exponent = 0 if flags & 32 and code == most - 1 else (first + code) % 256
                if width == 16 - rest:
                    exponent = code
                elif code == most:
                    exponent, lost = some[lost], lost + 1
                r[slot] = exponent << rest | level >> width << 8 | some[at + slot]
            at, turned = at + 32 + 4 * bits, r[slots]
            values[block] = turned >> 1 | (turned & 1) << 15
        here = out[number * tile : (number + 1) * tile]
        here[:] = values.reshape(-1)[: len(here)]
    return out


def step(symbol: int, extra: int) -> tuple[int, int]:
    """Return a symbol's number of extra bits, and its delta from the lowest bits of ``extra``."""
    if symbol == 102:
        return 16, extra & 0xFFFF
    sign, at = symbol >= 72, symbol - 72 if symbol >= 72 else symbol
    plain, each = (2, 1) if sign else (32, 2)
    k = (at - plain >> each) + (1 if sign else 5)
    count = 0 if at < plain else k - each
    z = at if at < plain else (1 << each | at - plain & 2**each - 1) << count | extra & 2**count - 1
    return count, sign << 15 | (-(z + 1) // 2 if z % 2 else z // 2) % 2**15


def stepcode(data: bytes, old: Any) -> Any:
    """Decode values from deltas; ``old``: the previous values as uint16; None: no reference."""
    _, _, kind, mode, lowest, numel = struct.unpack_from("<4sBBBBQ", data)
    tile, length, size, _ = struct.unpack_from("<4I", data, 16)
    if mode:
        return expcode(data[32:]) if mode == 2 else np.frombuffer(data[32 : 32 + 2 * numel], "<u2")
    model, at = [], 32
    for _ in range(16):
        rows = [struct.unpack_from("<BH", data, at + 1 + 3 * n) for n in range(data[at])]
        at, rows = at + 1 + 3 * data[at], rows or [(0, 4095)]
        rows.append((102, 4096 - sum(frequency for _, frequency in rows)))
        model.append([(s, sum(f for _, f in rows[:n]), f) for n, (s, f) in enumerate(rows)])
    tiles, out = -(-numel // tile), old.copy()
    starts = [*struct.unpack_from(f"<{tiles}I", data, 32 + size), length]
    for number in range(tiles):
        begin, end = (32 + size + 4 * (tiles + n) for n in starts[number : number + 2])
        here = out[number * tile : (number + 1) * tile]
        count = int.from_bytes(data[begin : begin + 4], "little") if end > begin else 0
        if count == 2**32 - 1:
            here[:] = np.frombuffer(data[begin + 4 : begin + 4 + 2 * len(here)], "<u2")
        elif end > begin:
            states = list(struct.unpack_from("<32I", data, begin + 4))
            words = iter(struct.unpack_from(f"<{count}H", data, begin + 132))
            extra = int.from_bytes(data[begin + 132 + -(-count // 2) * 4 : end], "little")
            for i, bits in enumerate(here.tolist()):
                context = min(max(((bits & 0x7FFF) >> (7 if kind == 1 else 10)) - lowest, 0), 15)
                s, state = states[i % 32] % 4096, states[i % 32]
                symbol, low, f = next(r for r in model[context] if r[1] <= s < r[1] + r[2])
                state = f * (state // 4096) + s - low
                states[i % 32] = state if state >= 2**16 else state << 16 | next(words)
                taken, moved = step(symbol, extra)
                extra >>= taken
                here[i] = (bits ^ moved) & 0x8000 | (bits + moved) & 0x7FFF
    return out


class Reader:
    """A folder's weights as 16-bit patterns: ``values`` by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.held, self.values = folder, [0, ""], dict[str, Any]()

    def apply(self, version: int) -> None:
        """Apply a version: a full one, or the successor of the held one."""
        manifest = json.loads((self.folder / f"v{version:010d}.json").read_text())
        digest = manifest.pop("digest")
        text = json.dumps(manifest, sort_keys=True).encode()
        assert hashlib.blake2b(text, digest_size=16).hexdigest() == digest
        full, new = manifest["parent"] is None, {n: v.copy() for n, v in self.values.items()}
        assert full or [manifest["parent"], manifest["parent_digest"]] == self.held
        for name, (shape, _) in (manifest["table"] or {}).items():
            new[name] = np.zeros(int(np.prod(shape)), np.uint16)
        for part in manifest["parts"]:
            data = (self.folder / "parts" / part["file"]).read_bytes()
            (size,) = struct.unpack_from("<Q", data, len(data) - 32)
            index = data[-32 - size : -32]
            assert data[:16] == b"hcpart\1\0" + struct.pack("<II", part["rank"], 0)
            assert len(data) == part["nbytes"] and data[-8:] == b"hcpend\1\0"
            assert checksum(data[:16] + index) == data[-24:-8].hex() == part["digest"]
            for piece in json.loads(index)["pieces"]:
                name, start, count, runs, stride, coding, at, nbytes, _, before, after, sent = piece
                where = (start + stride * np.arange(runs)[:, None] + np.arange(count)).reshape(-1)
                held, payload = new[name][where], data[at : at + nbytes]
                assert full or checksum(held.tobytes()) == before
                assert not sent or checksum(data[at : at + -(-nbytes // 16) * 16]) == sent
                if coding == "raw":
                    held = np.frombuffer(payload, "<u2")
                elif coding != "same":
                    held = stepcode(payload, None if coding == "alone" else held)
                assert checksum(held.tobytes()) == after
                new[name][where] = held
        self.values, self.held = new, [version, digest]
