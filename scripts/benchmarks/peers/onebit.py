"""1-bit Adam (arXiv 2102.02888, algorithm 1), reimplemented from the paper."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.blocks import pack_signs, unpack_signs
from benchmarks.peers.wire import Wire


class OneBitAdam(torch.optim.Optimizer):
    """Adam on one flat vector; from step ``freeze`` on, ranks exchange signs of momenta.

    1. Before: Adam with the averaged gradient, bias correction included.
    2. After, v stays as it is. m = b1 m + (1 - b1) g with this rank's gradient g.
    3. Every rank sends C[m + worker error] in chunks to the chunks' owners; the owner averages and
       sends C[average + server error] to everybody: that is m now, on all ranks.
    4. C[x] is sign(x) times a scale that keeps the norm, |x| / sqrt(n), one scale for every
       parameter (of every chunk); what it leaves out is the error, added the next time.

    Weight decay is AdamW's, as in the runs it is compared with. Weights whose v is zero at the
    freeze (rows of unseen tokens) stay unchanged, since a sign over sqrt(0) is not finite;
    DeepSpeed used ``exp_avg_mask`` for that.

    Args:
        weights: (W * c,) fp32, updated in place. Gradient: ``weights.grad``, of this rank alone.
        owners: (W * c,) parameter number of every value.
        exact: average the momenta as they are. With a frozen v and gradients clipped one by one
            this is another optimizer than Adam, which shows in losses with no compression at all.
    """

    def __init__(
        self, weights: Tensor, owners: Tensor, wire: Wire, freeze: int,
        lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, clip: float = 0.0, exact: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([weights], defaults)
        self.weights, self.wire, self.freeze, self.clip = weights, wire, freeze, clip
        self.exact = exact
        self.steps = 0
        self.ranks = dist.get_world_size()
        self.momentum, self.variance = torch.zeros_like(weights), torch.zeros_like(weights)
        self.worker_error = torch.zeros_like(weights)
        rows = owners.view(self.ranks, -1)
        self._segments, self._lengths = segments(rows)
        rank = dist.get_rank()
        self._own = self._segments[rank : rank + 1]
        self.server_error = torch.zeros(1, rows.shape[1], device=weights.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights."""
        assert closure is None and self.weights.grad is not None
        self.steps += 1
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        gradient = self.weights.grad
        warm = self.steps <= self.freeze
        if warm:
            gradient = self.wire.all_reduce(gradient) / self.ranks
        if self.clip:  # after the freeze only this rank's gradient norm is known
            gradient = gradient * min(1.0, self.clip / (float(gradient.norm()) + 1e-6))
        self.momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        if warm:
            self.variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            self.momentum.copy_(self.average(self.momentum))
        root = (self.variance / (1 - beta2 ** min(self.steps, self.freeze))).sqrt()
        update = self.momentum / (1 - beta1**self.steps) / (root + group["eps"])
        if not warm:
            update.masked_fill_(self.variance == 0, 0.0)
        self.weights.mul_(1 - group["lr"] * group["weight_decay"])
        self.weights.add_(update, alpha=-group["lr"])

    def average(self, momentum: Tensor) -> Tensor:
        """Step 3: average by compressed messages; the result is the same on all ranks."""
        if self.exact:
            return self.wire.all_reduce(momentum) / self.ranks
        rows = (momentum + self.worker_error).view(self.ranks, -1)
        message, decoded = self._compress(rows, self._segments)
        self.worker_error = (rows - decoded).view(-1)
        received = self.wire.all_to_all(message, None)
        segments = self._own.expand(self.ranks, -1)
        total = self._decompress(received, segments).mean(0, keepdim=True) + self.server_error
        message, decoded = self._compress(total, self._own)
        self.server_error = total - decoded
        gathered = self.wire.all_gather(message[0], None)
        return self._decompress(gathered, self._segments).view(-1)

    def _compress(self, rows: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's message and the values that its receiver decodes."""
        count = self._lengths.shape[1]
        none = torch.zeros(len(rows), count, device=rows.device)
        sizes = none.scatter_add(1, segments, torch.ones_like(rows))
        squares = none.scatter_add(1, segments, rows.square())
        scales = (squares / sizes.clamp(min=1)).sqrt()
        message = torch.cat([pack_signs(rows), scales.view(torch.uint8)], dim=1)
        return message, self._decompress(message, segments)

    def _decompress(self, message: Tensor, segments: Tensor) -> Tensor:
        split = segments.shape[1] // 8
        # copy: the scales after the signs may be unaligned for floats
        scales = message[:, split:].clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.float32)
        return unpack_signs(message[:, :split]) * scales.gather(1, segments)


def segments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Number the parameter segments that share a scale, given (ranks, c) parameter indices.

    Returns segment numbers (ranks, c), from 0 in every row, and lengths (ranks, max segments).
    """
    numbers = rows - rows[:, :1]
    most = int(numbers.max()) + 1
    lengths = torch.zeros(len(rows), most, dtype=torch.int64, device=rows.device)
    lengths.scatter_add_(1, numbers, torch.ones_like(numbers))
    return numbers, lengths


def warm_up_steps(steps: int, share: float) -> int:
    """Return the number of steps before the freeze; the paper uses 15 to 25 % of a run."""
    return max(1, math.ceil(share * steps))
