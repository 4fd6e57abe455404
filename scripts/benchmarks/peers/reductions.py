"""Quantized reduce-scatters of gradients: qgZ, LoCo and SDP4Bit, reimplemented.

All three are two-level all-to-alls of low-bit blocks; they differ in bits, rotation and error
feedback. Vectors are fp32 with W * c values; rank i gets values i * c to (i + 1) * c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.blocks import Blocks
from benchmarks.peers.wire import Nodes, Wire


class TwoLevel:
    """All-to-all and sum inside nodes, then between nodes (ZeRO++, arXiv 2306.10209).

    Section 3.3, figures 6 to 9: it quantizes once per level, not per hop, and reorders slices
    before the first exchange so that rank i ends with chunk i. A level of one member neither sends
    nor quantizes.
    """

    def __init__(self, wire: Wire, nodes: Nodes, intra: Blocks, inter: Blocks) -> None:
        self.wire, self.nodes, self.intra, self.inter = wire, nodes, intra, inter

    def reduce(self, values: Tensor) -> Tensor:
        """Return this rank's share of the average over all ranks. ``values`` is not modified."""
        nodes = self.nodes
        share = len(values) // nodes.ranks
        # 1. slices for local peer l: its chunks on every node
        slices = values.view(nodes.count, nodes.per_node, share).transpose(0, 1)
        rows = slices.reshape(nodes.per_node, nodes.count * share)
        # 2. inside the node
        if nodes.per_node > 1:
            rows = self._exchange(rows, self.intra, nodes.intra, "intra").sum(0, keepdim=True)
        # 3. between nodes
        rows = rows.view(nodes.count, share)
        if nodes.count > 1:
            rows = self._exchange(rows, self.inter, nodes.inter, "inter")
        return rows.sum(0) / nodes.ranks

    def _exchange(self, rows: Tensor, blocks: Blocks, group: object, level: str) -> Tensor:
        message = self.encode(rows, blocks, level)
        return blocks.decode(self.wire.all_to_all(message, group), rows.shape[1])

    def encode(self, rows: Tensor, blocks: Blocks, level: str) -> Tensor:
        """Encode ``rows`` at ``level``; this class has no error feedback."""
        return blocks.encode(rows)


def qgz(wire: Wire, nodes: Nodes, group: int = 128) -> TwoLevel:
    """Return qgZ: 4 bits on both levels, no error feedback.

    DeepSpeed uses ``max(shape)`` groups per matrix, so the group size is the matrix' shorter side:
    128 for the example at its default width.
    """
    return TwoLevel(wire, nodes, Blocks(4, group), Blocks(4, group))


def sdp4bit(wire: Wire, nodes: Nodes, group: int = 128) -> TwoLevel:
    """Return SDP4Bit's TLq-HS (arXiv 2410.15526, section 3.2).

    8 bits inside a node, 4 bits between nodes behind a Hadamard rotation, no error feedback.
    """
    return TwoLevel(wire, nodes, Blocks(8, group), Blocks(4, group, rotate=True))


class LoCo(TwoLevel):
    """Low-bit reduction with a moving average of the error (LoCo, arXiv 2407.04480, algorithm 1).

    1. h = g + e             add the previous error,
    2. q = Q(h)              send it at 4 bits,
    3. e = a e + (1 - a) (h - deQ(q)), kept in 8 bits,
    4. e = 0 every ``reset`` steps.

    Both levels keep errors. a is 0.8, DeepSpeed's default of ``err_beta``; ``reset`` counts steps,
    as in the paper, not tensors, as in DeepSpeed's removed implementation.
    """

    def __init__(
        self, wire: Wire, nodes: Nodes, group: int = 128, keep: float = 0.8, reset: int = 1024
    ) -> None:
        super().__init__(wire, nodes, Blocks(4, group), Blocks(4, group))
        self.keep, self.reset, self.steps = keep, reset, 0
        self._store = Blocks(8, group)
        self._errors: dict[str, Tensor] = {}  # encoded residuals

    def reduce(self, values: Tensor) -> Tensor:
        """Reduce as the base class does; reset the errors every ``reset`` steps."""
        if self.steps and self.steps % self.reset == 0:
            self._errors.clear()
        self.steps += 1
        return super().reduce(values)

    def encode(self, rows: Tensor, blocks: Blocks, level: str) -> Tensor:
        """Do steps 1 to 3."""
        error = self.error(level, rows)
        compensated = rows + error
        message = blocks.encode(compensated)
        left_out = compensated - blocks.decode(message, rows.shape[1])
        self._errors[level] = self._store.encode(self.keep * error + (1 - self.keep) * left_out)
        return message

    def error(self, level: str, rows: Tensor) -> Tensor:
        """Return the error to add to ``rows``; zeros before the first step."""
        kept = self._errors.get(level)
        return torch.zeros_like(rows) if kept is None else self._store.decode(kept, rows.shape[1])
