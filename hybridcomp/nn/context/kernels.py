"""Compute attention of one block with a device's fastest kernel: torch's kernels on a GPU.

torch's flash kernel takes fp16 and bf16 and heads of up to 256 values, its memory-efficient kernel
fp32 as well. Both kernels return each row's log-sum-exp. Their backward pass takes the log-sum-exp
over all keys, so it returns a block's part of the whole gradients. Both kernels are called
directly, since ``scaled_dot_product_attention`` does not return the log-sum-exp. Inputs that
neither takes (documents, fp64), and all inputs on a CPU, are computed in plain torch (``blocks``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridcomp.job.autocast import off
from hybridcomp.nn.context import blocks
from hybridcomp.nn.context.blocks import Mask

Kind = Literal["flash", "efficient", "plain"]
#: largest head width of the flash kernel; both kernels need a head width that is a multiple of STEP
FLASH_WIDTH, STEP = 256, 8
#: largest head width with a backward pass on GPUs with little shared memory: torch itself leaves
#: heads of 193 to 224 values to other kernels there
SMALL_WIDTH, SMALL = 192, ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
#: the efficient kernel pads the rows of its logarithms to a multiple of this
ROWS = 32


def kind_of(q: Tensor, v: Tensor, masked: bool) -> Kind:
    """Choose the kernel for queries (B, H, S, D) and values; ``masked``: with documents."""
    if not q.is_cuda or masked or q.dtype == torch.float64:
        return "plain"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and q.shape[-1] == v.shape[-1] <= _flash_width(q.device):
        return "flash"
    return "efficient"


def _flash_width(device: torch.device) -> int:
    """Return the largest head width of the flash kernel on this GPU; 0 before Ampere."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    return SMALL_WIDTH if capability in SMALL else FLASH_WIDTH


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """Run ``blocks.forward`` with kernel ``kind``; torch's kernels keep the dtype of ``q``."""
    if kind == "plain":
        with off(q):
            return blocks.forward(q, k, v, mask, scale)
    width = v.shape[-1]
    q, k, v = (_padded(values) for values in (q, k, v))
    if kind == "flash":
        out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, mask.causal, False, scale=scale
        )
    else:
        k, v = (_expanded(values, q.shape[1]) for values in (k, v))
        out, logs, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, mask.causal, scale=scale
        )
    return out[..., :width], logs[:, :, : q.shape[2]]


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    delta: Tensor,
    logs: Tensor,
    mask: Mask,
    scale: float,
    kind: Kind,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``blocks.backward`` with kernel ``kind``. torch's kernels keep the dtype of ``q`` and
    take the context ``out`` (B, H, S, D) over all keys instead of ``delta``.
    """
    if kind == "plain":
        with off(q):
            return blocks.backward(grad, q, k, v, delta, logs, mask, scale)
    widths = [values.shape[-1] for values in (q, k, v)]
    heads, kept = q.shape[1], k.shape[1]
    grad, q, k, v, out = (_padded(values) for values in (grad, q, k, v, out))
    if kind == "flash":
        # seed and offset of dropout, which is off
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logs.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
            mask.causal, seed, seed[0], scale=scale,
        )  # fmt: skip
    else:
        k, v = (_expanded(values, heads) for values in (k, v))
        out = _by_tokens(out)
        padded = F.pad(logs, (0, -logs.shape[2] % ROWS), value=torch.inf).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False],
            mask.causal, scale=scale,
        )[:3]  # fmt: skip
        grads = (grads[0], *(_reduced(values, kept) for values in grads[1:]))
    grad_q, grad_k, grad_v = (
        values[..., :width] for values, width in zip(grads, widths, strict=True)
    )
    return grad_q, grad_k, grad_v


def _padded(values: Tensor) -> Tensor:
    """Pad heads with zeros to a multiple of ``STEP``, which changes neither scores nor context.

    It also makes heads contiguous, as kernels require (an expanded gradient is not).
    """
    missing = -values.shape[-1] % STEP
    if missing:
        return F.pad(values, (0, missing))
    return values if values.stride(-1) == 1 else values.contiguous()


def _by_tokens(out: Tensor) -> Tensor:
    """Return a context (B, H, S, D) in memory order (B, S, H, D).

    The efficient kernel assumes this layout for 16-bit values (``o_strideM`` in torch's
    ``mem_eff_attention/kernel_backward.h``) and otherwise reads rows of other heads. Its forward
    pass returns this layout, which ``_padded`` does not preserve.
    """
    heads, width = out.shape[1], out.shape[3]
    if out.stride()[1:] == (width, heads * width, 1):
        return out
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _expanded(values: Tensor, heads: int) -> Tensor:
    """Repeat keys or values (B, K, T, D) for the ``heads`` query heads."""
    times = heads // values.shape[1]
    return values if times == 1 else values.repeat_interleave(times, dim=1)


def _reduced(values: Tensor, kept: int) -> Tensor:
    """Sum the gradients of repeated heads, (B, H, T, D) to (B, K, T, D), in fp32."""
    if values.shape[1] == kept:
        return values
    return values.view(values.shape[0], kept, -1, *values.shape[2:]).float().sum(2)
