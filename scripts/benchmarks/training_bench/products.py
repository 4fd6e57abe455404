"""Multiply bf16 matrices on CPUs without bf16 instructions.

Without AVX-512 torch uses a loop about forty times slower than fp32, which would dominate a step's
compute time, and link rates are set relative to that. Here bf16 operands are converted to fp32,
multiplied and rounded once, as tensor cores do, in all arms.
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
    """Return whether this CPU multiplies bf16 matrices in a slow loop."""
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


#: keeps the registrations alive; freeing them would undo the override
_kept: list[Any] = []


def install() -> None:
    """Override bf16 products on the CPU in this process.

    The ``out=`` variants stay unchanged and do the work.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about overriding a kernel of torch
        for name, found in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm)):
            library.impl(name, found, "CPU")
    attention: Any = F.scaled_dot_product_attention

    def widened(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor:
        wide = (values.to(_wide(values)) for values in (query, key, value))
        mixed: Tensor = attention(*wide, *more, **named)
        return mixed.to(query.dtype)

    F.scaled_dot_product_attention = widened
    _kept.append(library)
