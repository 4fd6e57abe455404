"""Compute ``F.cross_entropy`` over a vocabulary that is sharded over the ranks of a row.

Each rank sends three numbers per token along its row, in fp32, and then three numbers in all along
its column, natively.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridcomp.nn.tp2d.mesh import Mesh, fail_unless


class CrossEntropyFunction(torch.autograd.Function):
    """Mean cross entropy over all tokens of the mesh, in nats, bit-identical on every rank."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, mesh: Mesh, vocabulary: int, ignore: int
    ) -> Tensor:
        """Compute the loss of logits (..., V / q) and labels (...), both of this row's samples."""
        values, local, here = _parts(logits, labels, mesh, vocabulary)
        peak = values.amax(-1)
        total = (values - peak.unsqueeze(-1)).exp().sum(-1)
        target = values.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        own = torch.stack([peak, total, target])
        peaks, totals, targets = mesh.gather(own, "row", "activations").unbind(1)
        highest = peaks.amax(0)
        log_sum = (totals * (peaks - highest).exp()).sum(0).log() + highest
        counted = labels.reshape(-1) != ignore
        odd = counted & ((labels < 0) | (labels >= vocabulary)).reshape(-1)
        losses = (log_sum - targets.sum(0)).masked_fill(~counted, 0.0)
        sums = torch.stack(
            [losses.sum(), counted.sum().to(losses.dtype), odd.sum().to(losses.dtype)]
        )
        loss, count, wrong = mesh.gather(sums, "column", "activations").sum(0)
        fail_unless(wrong == 0, f"labels of a vocabulary of {vocabulary} words")
        ctx.mesh, ctx.vocabulary, ctx.ignore = mesh, vocabulary, ignore
        ctx.save_for_backward(logits, labels, log_sum, count)
        mean: Tensor = loss / count
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return ``softmax - target`` for this rank's logits, scaled; send no message."""
        logits, labels, log_sum, count = ctx.saved_tensors
        values, local, here = _parts(logits, labels, ctx.mesh, ctx.vocabulary)
        out = (values - log_sum.unsqueeze(-1)).exp()
        out.scatter_add_(-1, local.unsqueeze(-1), -here.to(out.dtype).unsqueeze(-1))
        counted = labels.reshape(-1) != ctx.ignore
        # 0 as in torch, also where no label counts: the loss is then NaN
        out *= torch.where(counted, grad / count, 0.0).unsqueeze(-1)
        return out.view(logits.shape).to(logits.dtype), None, None, None, None


def _parts(
    logits: Tensor, labels: Tensor, mesh: Mesh, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return flat fp32 (or wider) logits, the labels' local indices, and ``here``.

    Logits of padding words get the lowest value. ``here``: whether this rank holds the label's
    logit; if not, the index is 0.
    """
    width = logits.shape[-1]
    values = logits.detach().reshape(-1, width)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    start = mesh.column * width
    if start + width > vocabulary:
        beyond = torch.arange(start, start + width, device=values.device) >= vocabulary
        values = values.masked_fill(beyond, torch.finfo(values.dtype).min)
    local = labels.reshape(-1) - start
    here = (local >= 0) & (local < width)
    return values, local.masked_fill(~here, 0), here


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mesh: Mesh,
    vocabulary: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross entropy in nats over the samples of all rows, fp32 or wider.

    Args:
        logits: (..., V / q), of this rank.
        labels: (...), integers, of this row's samples.
        mesh: the ranks.
        vocabulary: V before padding to a multiple of q; None: it is not padded.
        ignore_index: tokens with this label do not count.

    Fails like ``F.cross_entropy``, on all ranks, on any other label beyond the vocabulary: with an
    IndexError on a CPU, a device-side assertion on a GPU.
    """
    size = mesh.q * logits.shape[-1] if vocabulary is None else vocabulary
    out: Tensor = CrossEntropyFunction.apply(logits, labels, mesh, size, ignore_index)  # type: ignore[no-untyped-call]
    return out
