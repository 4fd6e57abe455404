"""Detect whether an engine's weights have changed since the last update, without a copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: 4-byte words that are summed at once; each takes 24 bytes of temporary memory
CHUNK = 1 << 21
#: odd 64-bit factors for position and word
_FACTORS = (-7046029254386353131, -4417276706812531889)


@torch.no_grad()
def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return a 64-bit hash of each tensor, computed on its device; the host waits once per device.

    Each word is hashed with its position, and the hashes are added modulo 2**64. This detects
    mistakes but not deliberate manipulation.
    """
    sums = [(name, _sum(tensor)) for name, tensor in tensors]
    found: dict[str, int] = {}
    for device in {one.device for _, one in sums}:
        there = [(name, one) for name, one in sums if one.device == device]
        values = torch.stack([one for _, one in there]).tolist()
        found.update((name, value) for (name, _), value in zip(there, values, strict=True))
    return found


def differing(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the names whose fingerprints differ, or that exist only before or only after."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0:
        flat = flat.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(min(CHUNK, flat.numel()), device=flat.device)
    for begin in range(0, flat.numel(), CHUNK):
        words = flat[begin : begin + CHUNK].to(torch.int64)
        hashed = (places[: words.numel()] + begin) * _FACTORS[0]
        hashed += words
        hashed *= _FACTORS[1]
        hashed ^= hashed >> 29
        total += hashed.sum()
    return total
