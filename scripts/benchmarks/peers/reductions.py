"""Quantized reduce-scatters of gradients: qgZ and SDP4Bit, reimplemented.

Both are two-level all-to-alls of low-bit blocks; they differ in bits and rotation.
Vectors are fp32 with W * c values; rank i gets values i * c to (i + 1) * c.
"""

from __future__ import annotations

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
            rows = self._exchange(rows, self.intra, nodes.intra).sum(0, keepdim=True)
        # 3. between nodes
        rows = rows.view(nodes.count, share)
        if nodes.count > 1:
            rows = self._exchange(rows, self.inter, nodes.inter)
        return rows.sum(0) / nodes.ranks

    def _exchange(self, rows: Tensor, blocks: Blocks, group: object) -> Tensor:
        message = blocks.encode(rows)
        return blocks.decode(self.wire.all_to_all(message, group), rows.shape[1])


def qgz(wire: Wire, nodes: Nodes, group: int = 128) -> TwoLevel:
    """Return qgZ: 4 bits on both levels, no error feedback.

    DeepSpeed uses ``max(shape)`` groups per matrix, so the group size is the matrix' shorter side:
    128 for the example at its default width.
    """
    return TwoLevel(wire, nodes, Blocks(4, group), Blocks(4, group))


def sdp4bit(wire: Wire, nodes: Nodes, group: int = 128) -> TwoLevel:
    """Return SDP4Bit's TLq-HS (arXiv 2410.15526, section 3.2).

    8 bits inside a node, 4 bits after a Hadamard rotation between nodes, no error feedback.
    """
    return TwoLevel(wire, nodes, Blocks(8, group), Blocks(4, group, rotate=True))
