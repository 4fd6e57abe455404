"""Name dtypes and the codecs of a message for users."""

from __future__ import annotations

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.checks import DTYPE_NAMES, DTYPES

__all__ = ["DTYPES", "DTYPE_NAMES", "used_for"]


def used_for(codec: Codec, summed: bool, dtype: torch.dtype) -> str:
    """Describe the codecs of a message of ``dtype``; ``summed``: it is a reduction."""
    if not summed:
        (only,) = codec.split_error_budget(1, 1, result=dtype)
        return _short(only)
    hops = codec.split_error_budget(2, 2, result=dtype, exact=1)
    (once,) = codec.split_error_budget(1, 2, exact=1)
    if once == hops[0]:
        return _short(once)
    twice = " and ".join(_short(hop) for hop in dict.fromkeys(hops))
    return f"{_short(once)} (in two hops {twice})"


def _short(codec: Codec) -> str:
    if codec.lossless:
        return f"{codec.name} (lossless)"
    bound = getattr(codec, "error_bound", None)
    return codec.spec if bound is None else f"{codec.name} {bound:.3g}"
