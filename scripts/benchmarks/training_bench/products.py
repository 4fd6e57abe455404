"""Products of bf16 matrices on processors that have no instructions for them.

Without AVX-512 torch falls back to a loop that takes about forty times as long as fp32, which would
make the compute of a step, against which every network is set, a property of that loop. Here bf16
operands are widened, multiplied in fp32 and rounded once, as tensor cores do, for all arms alike.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.lru_cache(maxsize=1)
def needed() -> bool:
    """Return whether this processor multiplies bf16 matrices in a slow loop."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _mm(left: Tensor, right: Tensor) -> Tensor:
    wide = _wide(left)
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=wide)
    return torch.mm(left.to(wide), right.to(wide), out=out).to(left.dtype)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    wide = _wide(left)
    out = left.new_empty((*left.shape[:2], right.shape[2]), dtype=wide)
    return torch.bmm(left.to(wide), right.to(wide), out=out).to(left.dtype)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    wide = _wide(left)
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=wide)
    terms = bias.to(wide), left.to(wide), right.to(wide)
    return torch.addmm(*terms, beta=beta, alpha=alpha, out=out).to(left.dtype)


def _wide(values: Tensor) -> torch.dtype:
    return torch.float32 if values.dtype == torch.bfloat16 else values.dtype


#: what is installed; freed, it would be taken back
_kept: list[Any] = []


def install() -> None:
    """Widen products on the CPU from here on, in this process.

    The variants that are given their output are left as they are, and do the work.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of torch is overridden
        for name, found in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm)):
            library.impl(name, found, "CPU")
    attention: Any = F.scaled_dot_product_attention

    def widened(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor:
        wide = (values.to(_wide(values)) for values in (query, key, value))
        mixed: Tensor = attention(*wide, *more, **named)
        return mixed.to(query.dtype)

    F.scaled_dot_product_attention = widened
    _kept.append(library)
