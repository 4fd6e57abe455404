"""Broadcast the blocks of a row or column of the mesh in turn, and reduce sums along it.

Transfers overlap with matrix products: during one product, the next block is broadcast and the
previous product is reduced. Every rank of a line posts the same messages in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from hybridcomp.collectives import Handle
from hybridcomp.dimensions import Direction
from hybridcomp.nn.tp2d.mesh import Axis, BroadcastUnderWay, Mesh


class LineBlocks:
    """Iterate over the blocks of a line's ranks, each broadcast to all of them; used once.

    The first broadcast starts on construction. At most two blocks are in memory.
    """

    def __init__(self, mesh: Mesh, axis: Axis, block: Tensor, kind: Direction) -> None:
        """Start the first broadcast; all ranks' blocks must have one shape and dtype."""
        self._mesh, self._axis, self._kind = mesh, axis, kind
        self._own = block.detach().contiguous()
        self._posted = 0
        self._under_way: deque[BroadcastUnderWay] = deque()
        self._post()

    def __iter__(self) -> Iterator[Tensor]:
        while self._under_way:
            sent = self._under_way.popleft()
            self._post()
            yield sent.wait().view(self._own.shape)

    def _post(self) -> None:
        root, mesh = self._posted, self._mesh
        if root == mesh.q:
            return
        self._posted += 1
        flat = self._own.view(-1)
        if mesh.place(self._axis) != root:
            flat = torch.empty_like(flat)
        self._under_way.append(mesh.broadcast(flat, root, self._axis, self._kind))


class LineSums:
    """Reduce one sum to each rank of a line, from addends of all ranks of the line."""

    def __init__(self, mesh: Mesh, axis: Axis, kind: Direction) -> None:
        self._mesh, self._axis, self._kind = mesh, axis, kind
        self._under_way: deque[Handle] = deque()
        self._own: Tensor | None = None

    def add(self, root: int, part: Tensor) -> None:
        """Post the reduction of ``part``, this rank's addend to the sum of position ``root``."""
        part, out = part.contiguous(), None
        if self._mesh.place(self._axis) == root:
            wide = torch.promote_types(part.dtype, torch.float32)
            self._own = torch.empty_like(part, dtype=wide)
            out = self._own.view(-1)
        handle = self._mesh.reduce(part.view(-1), out, root, self._axis, self._kind)
        self._under_way.append(handle)
        if len(self._under_way) > 1:
            self._under_way.popleft().wait()

    def own(self, dtype: torch.dtype) -> Tensor:
        """Wait for all reductions and return the sum that belongs to this rank."""
        while self._under_way:
            self._under_way.popleft().wait()
        assert self._own is not None, "nothing was added for this rank"
        return self._own.to(dtype)
