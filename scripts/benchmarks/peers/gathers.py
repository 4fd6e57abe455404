"""Gather updated weight shards: uncompressed, in 8 bits, or as 4-bit differences."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.blocks import Blocks
from benchmarks.peers.wire import Wire


class Gather(Protocol):
    """All-gather of weights."""

    def gather(self, share: Tensor) -> Tensor:
        """Gather each rank's new weights (c,) fp32 to (W * c,) fp32, equal on all ranks."""


class Native:
    """Gather in the parameters' dtype, fp32 or bf16."""

    def __init__(self, wire: Wire, dtype: torch.dtype) -> None:
        self.wire, self.dtype = wire, dtype

    def gather(self, share: Tensor) -> Tensor:
        """Gather exactly, apart from the cast to ``dtype``."""
        rows = self.wire.all_gather(share.to(self.dtype).view(torch.uint8), None)
        return rows.view(-1).view(self.dtype).float()


class QwZ:
    """8-bit blocks (ZeRO++, arXiv 2306.10209, section 3.1); owners decode their own shards too."""

    def __init__(self, wire: Wire, group: int = 128) -> None:
        self.wire, self.blocks = wire, Blocks(8, group)

    def gather(self, share: Tensor) -> Tensor:
        """Gather with an error of at most half a level, 1/254 of each group's largest weight."""
        message = self.blocks.encode(share.unsqueeze(0))[0]
        return self.blocks.decode(self.wire.all_gather(message, None), len(share)).reshape(-1)


class Differences:
    """SDP4Bit's quantization of weight differences (arXiv 2410.15526, section 3.1).

    Every rank keeps an identical copy of all weights. The owner of a shard sends its new weights
    minus the copy's at 4 bits, and all ranks add this difference to their copies. The next
    difference contains the quantization error, so the error does not accumulate.
    """

    def __init__(self, wire: Wire, weights: Tensor, group: int = 128) -> None:
        self.wire, self.blocks = wire, Blocks(4, group)
        self.copy = weights.clone()

    def gather(self, share: Tensor) -> Tensor:
        """Update this rank's copy of all weights and return it."""
        count = len(share)
        rank = dist.get_rank()
        difference = share - self.copy[rank * count : (rank + 1) * count]
        message = self.blocks.encode(difference.unsqueeze(0))[0]
        self.copy += self.blocks.decode(self.wire.all_gather(message, None), count).reshape(-1)
        return self.copy
