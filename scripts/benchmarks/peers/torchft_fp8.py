"""DiLoCo with torchft's 8-bit all-reduce, in eager torch.

After the source of torchft 0.2.0 (local_sgd.py, manager.py, collectives.py, quantization.py). It
reproduces messages, bytes and arithmetic, with one all-reduce per parameter, torchft's default. It
leaves out the quorum, the streams, and int8 instead of e4m3 on GPUs before compute capability 9.0.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.wire import Wire

#: largest value of e4m3, and bytes per scale
TOP, SCALE_NBYTES = 448.0, 4
#: outer optimizer of DiLoCo (arXiv 2311.08105), which torchft's user provides
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def encode(rows: Tensor) -> Tensor:
    """Encode (rows, columns) fp32 as uint8 rows: fp32 scale, e4m3 values, padding."""
    scales = TOP / rows.abs().amax(dim=1, keepdim=True)
    scales = torch.where(scales.isinf(), torch.ones_like(scales), scales)
    codes = (rows * scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([scales.view(torch.uint8), F.pad(codes, (0, -rows.shape[1] % 4))], dim=1)


def decode(message: Tensor, columns: int) -> Tensor:
    """Decode (rows, bytes) uint8 to (rows, columns) fp32."""
    scales = message[:, :SCALE_NBYTES].contiguous().view(torch.float32)
    codes = message[:, SCALE_NBYTES : SCALE_NBYTES + columns].contiguous()
    return codes.view(torch.float8_e4m3fn).float() / scales


def mean_of(values: Tensor, wire: Wire) -> Tensor:
    """Return the mean of fp32 ``values`` over all ranks, same shape, by a two-hop 8-bit reduction.

    Each rank owns some rows of a matrix (a vector has one row per value), sums them over the ranks,
    itself first, and encodes the sum again.
    """
    ranks, own = dist.get_world_size(), dist.get_rank()
    matrix = values.reshape(len(values), -1)
    count, columns = matrix.shape
    message = encode(F.pad(matrix, (0, 0, 0, -count % ranks)))
    nbytes = message.shape[1]
    received = wire.all_to_all(message.view(ranks, -1), dist.group.WORLD)
    order = [(own + index) % ranks for index in range(ranks)]
    parts = [decode(received[rank].view(-1, nbytes), columns) for rank in order]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    gathered = wire.all_gather(encode(total).view(-1), dist.group.WORLD)
    return decode(gathered.view(-1, nbytes), columns)[:count].view(values.shape) / ranks


class DiLoCoFp8:
    """AdamW on each rank, and outer SGD on the mean of the weight changes every ``every`` steps."""

    def __init__(
        self, model: nn.Module, wire: Wire, adam: dict[str, Any], clip: float, every: int
    ) -> None:
        """``clip``: limit of a rank's gradient norm, 0: none."""
        self.model, self._wire, self._clip, self._every = model, wire, clip, every
        self._parameters = list(model.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self._parameters, **adam)
        self._start = [p.detach().clone() for p in self._parameters]
        self._outer = torch.optim.SGD(self._parameters, **OUTER)
        self._steps = 0

    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Do nothing: the backward pass sends nothing."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """Update this rank's weights, and average with the other ranks when due."""
        if self._clip:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step()
        self._steps += 1
        if self._steps % self._every == 0:
            self._meet()
        self.model.zero_grad(set_to_none=False)

    @torch.no_grad()
    def _meet(self) -> None:
        for parameter, start in zip(self._parameters, self._start, strict=True):
            parameter.grad = mean_of(start - parameter, self._wire)
            parameter.copy_(start)
        self._outer.step()
        for parameter, start in zip(self._parameters, self._start, strict=True):
            start.copy_(parameter)
