"""Encode fp32 master weights relative to their bf16 parameters: only the missing bits.

A bf16 parameter is its rounded fp32 master. A reader that has the parameter lacks only the master's
lower 16 bits, and whether rounding carried into the upper 16: it did if the lower half is above the
middle. If the lower half is exactly the middle, rounding went to the even neighbour and may have
carried: where it did, and for some NaNs, the upper half is stored as well. The payload: values
beyond the end of the parameters, unchanged; positions of stored upper halves (int32); lower halves
(int16); upper halves (int16).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: lower half that lies in the middle between two bf16 values
MIDDLE = -(1 << 15)
#: bytes of a stored upper half with its position; bytes of a lower half
EXCEPTION, LOW = 6, 2


def encode_beside(master: Tensor, half: Tensor, out: Tensor) -> int | None:
    """Write the bits of ``master`` that ``half`` lacks into ``out``; return the bytes used.

    Args:
        master: 1-D fp32 on the host, contiguous, at least as many values as ``half``.
        half: 1-D bf16 on the host, contiguous.
        out: 1-D uint8 of the size of ``master``.

    Returns:
        None if ``half`` is not ``master`` rounded to bf16, or if nothing is saved.
    """
    count = half.numel()
    body, rest = master[:count], master[count:]
    if not torch.equal(body.bfloat16().view(torch.int16), half.view(torch.int16)):
        return None
    low, upper = _halves(body)
    places = (_upper(low, half) != upper).nonzero().flatten()
    used = rest.nbytes + LOW * count + EXCEPTION * len(places)
    if used > out.numel():
        return None
    wide, narrow = _parts(out[:used], rest.numel(), len(places), count)
    wide[: rest.numel()].copy_(rest.view(torch.int32))
    wide[rest.numel() :].copy_(places)
    narrow[:count].copy_(low)
    narrow[count:].copy_(upper[places])
    return used


def decode_beside(payload: Tensor, half: Tensor, out: Tensor) -> None:
    """Decode a payload of ``encode_beside`` into ``out``: 1-D fp32 on the host."""
    count, rest = half.numel(), out.numel() - half.numel()
    exceptions = (payload.numel() - 4 * rest - LOW * count) // EXCEPTION
    wide, narrow = _parts(payload, rest, exceptions, count)
    out[count:].view(torch.int32).copy_(wide[:rest])
    low, upper = _halves(out[:count])
    low.copy_(narrow[:count])
    upper.copy_(_upper(narrow[:count], half))
    upper[wide[rest:].long()] = narrow[count:]


def _parts(payload: Tensor, rest: int, exceptions: int, count: int) -> tuple[Tensor, Tensor]:
    """Split a payload into its values of 4 bytes (rest, positions) and of 2 bytes (halves)."""
    end = 4 * (rest + exceptions)
    assert payload.numel() == end + LOW * (count + exceptions), "checked by the footer"
    return payload[:end].view(torch.int32), payload[end:].view(torch.int16)


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    words = values.view(torch.int16)
    return words[0::2], words[1::2]


def _upper(low: Tensor, half: Tensor) -> Tensor:
    """Return the upper halves of the masters of ``half``, assuming no carry from the middle."""
    carried = (low < 0) & (low != MIDDLE)
    return half.view(torch.int16) - carried.to(torch.int16)
