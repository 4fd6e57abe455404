"""Stand-in for torch's GPU attention kernels: plain blocks in fp32."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

#: keeps the registrations alive; freeing them would undo the override
LIBRARIES: list[Any] = []


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    from hybridcomp.nn.context import blocks

    found = blocks.forward(q, k, v, blocks.Mask(causal), scale or q.shape[-1] ** -0.5)
    return _by_tokens(found[0].to(q.dtype)), found[1].float()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hybridcomp.nn.context import blocks

    wide = blocks.accumulator(q.dtype)
    delta = (out.to(wide) * grad.to(wide)).sum(-1)
    logs = logs[:, :, : q.shape[2]].to(wide)
    mask, by = blocks.Mask(causal), scale or q.shape[-1] ** -0.5
    found = blocks.backward(grad, q, k, v, delta, logs, mask, by)
    of_q, of_k, of_v = (
        _by_tokens(part.to(like.dtype)) for part, like in zip(found, (q, k, v), strict=True)
    )
    return of_q, of_k, of_v


def _by_tokens(values: Tensor) -> Tensor:
    """Return (B, H, S, D) with a token's heads adjacent in memory, as these kernels do."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16), "the flash kernel takes 16 bits"
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    none = q.new_empty(0)
    out, logs = _forward(q, k, v, causal, scale)
    return out, logs, none, none, q.shape[2], k.shape[2], seed, seed[:0], none


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor,
    cum_q: Any, cum_k: Any, most_q: int, most_k: int, dropout: float, causal: bool,
    seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(grad, q, k, v, out, logs, causal, scale)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, logs: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    out, found = _forward(q, k, v, causal, scale)
    return out, torch.nn.functional.pad(found, (0, -found.shape[2] % 32)), seed, seed.clone()


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, logs: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (*_backward(grad, q, k, v, out, logs, causal, scale), q.new_empty(0))


def place() -> None:
    """Register them in this process."""
    library: Any = cast("Any", torch.library).Library("aten", "IMPL")
    name = "_scaled_dot_product"
    for kernel, call in {
        f"{name}_flash_attention": flash,
        f"{name}_flash_attention_backward": flash_backward,
        f"{name}_efficient_attention": efficient,
        f"{name}_efficient_attention_backward": efficient_backward,
    }.items():
        library.impl(kernel, call, "CUDA")
    LIBRARIES.append(library)
