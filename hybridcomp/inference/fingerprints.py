"""Tell whether an engine's weights are still as they were left, without a copy of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: words of 4 bytes that are summed at once; they take 24 bytes each meanwhile
CHUNK = 1 << 21
#: odd factors of 64 bits, of position and word
_FACTORS = (-7046029254386353131, -4417276706812531889)


@torch.no_grad()
def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return 64 bits for each tensor, computed where it is; the host waits once for each device.

    Each word is hashed with its position, and the hashes are added modulo 2**64. This finds
    mistakes, and holds no secret against somebody who wants to deceive.
    """
    sums = [(name, _sum(tensor)) for name, tensor in tensors]
    found: dict[str, int] = {}
    for device in {one.device for _, one in sums}:
        there = [(name, one) for name, one in sums if one.device == device]
        values = torch.stack([one for _, one in there]).tolist()
        found.update((name, value) for (name, _), value in zip(there, values, strict=True))
    return found


def differing(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the names whose fingerprints differ, or that only one of the two has."""
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
