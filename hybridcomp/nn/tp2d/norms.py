"""Compute LayerNorm and RMSNorm over features that are sharded over the ranks of a row.

Each rank sends a few numbers per token along its row, natively, in fp32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridcomp.nn.tp2d.mesh import Mesh


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _moments(values: Tensor, mesh: Mesh, centred: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance over all features, both (..., 1); not ``centred``: 0, mean square.

    Each rank first subtracts the mean of its own features, so that a large mean costs no precision.
    """
    if not centred:
        square = mesh.gather(values.square().mean(-1), "row", "activations").mean(0)
        return torch.zeros_like(square).unsqueeze(-1), square.unsqueeze(-1)
    own = values.mean(-1)
    around = (values - own.unsqueeze(-1)).square().mean(-1)
    means, squares = mesh.gather(torch.stack([own, around]), "row", "activations").unbind(1)
    mean = means.mean(0)
    square = (squares + (means - mean).square()).mean(0)
    return mean.unsqueeze(-1), square.unsqueeze(-1)


class NormFunction(torch.autograd.Function):
    """Compute ``(values - mean) / deviation * weight + bias``; save two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mesh: Mesh,
        eps: float,
        centred: bool,
    ) -> Tensor:
        """Normalize (..., features / q) with vectors (features / q); ``centred``: LayerNorm."""
        whole = _wide(values)
        mean, square = _moments(whole, mesh, centred)
        scale = (square + eps).rsqrt()
        ctx.mesh, ctx.centred = mesh, centred
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(values, weight, mean, scale)
        out = (whole - mean) * scale
        if weight is not None:
            out = out * weight
        if bias is not None:
            out = out + bias
        return out.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of values, weight and bias; the latter two for this row's tokens."""
        values, weight, mean, scale = ctx.saved_tensors
        normed, grad = (_wide(values) - mean) * scale, _wide(grad)
        tokens = tuple(range(grad.dim() - 1))
        to_weight = None if weight is None else (grad * normed).sum(tokens).to(weight.dtype)
        to_bias = None if ctx.bias_dtype is None else grad.sum(tokens).to(ctx.bias_dtype)
        own = grad if weight is None else grad * weight
        means = [(own * normed).mean(-1), *([own.mean(-1)] if ctx.centred else [])]
        gathered = ctx.mesh.gather(torch.stack(means), "row", "gradients").mean(0)
        to_values = own - normed * gathered[0].unsqueeze(-1)
        if ctx.centred:
            to_values = to_values - gathered[1].unsqueeze(-1)
        return (to_values * scale).to(values.dtype), to_weight, to_bias, None, None, None


def normed(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mesh: Mesh,
    eps: float,
    centred: bool,
) -> Tensor:
    """Compute LayerNorm (``centred``) or RMSNorm on the mesh; see ``NormFunction``."""
    out: Tensor = NormFunction.apply(values, weight, bias, mesh, eps, centred)  # type: ignore[no-untyped-call]
    return out
