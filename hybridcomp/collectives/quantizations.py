"""How often an all_reduce quantizes a value on its way, and with which codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridcomp.codecs.base import Codec, Fused


def all_reduce_codecs(
    codec: Codec, dtype: torch.dtype, world_size: int, device: torch.device, cuts: Sequence[int]
) -> tuple[Codec, ...]:
    """Those of the quantizations of an ``all_reduce`` that returns ``dtype``.

    One where each of two ranks sends all values to the other (``pair``), two everywhere else. Where
    a GPU has the two hops in three launches it takes these: they read memory half as often.
    """
    twice = codec.hops(2, world_size, result=dtype, exact=1)
    if world_size != 2 or both_fused(twice, device, cuts) is not None:
        return twice
    return codec.hops(1, world_size, result=dtype)


def both_fused(
    codecs: tuple[Codec, ...], device: torch.device, cuts: Sequence[int]
) -> tuple[Codec, Fused] | None:
    """The codec and its kernels for both hops in three launches; None where it has none."""
    first, second = codecs
    fused = first.fused(device) if first == second and not cuts else None
    return None if fused is None else (first, fused)
