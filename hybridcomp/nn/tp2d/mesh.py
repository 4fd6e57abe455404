"""Mesh of q * q ranks with their rows and columns, and the collectives along them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.channels import Broadcast, Channels, Message, Reduce
from hybridcomp.channels.channel import Channel
from hybridcomp.collectives import Group, Handle, Meter, native_nbytes
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.steps import transfer
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Direction
from hybridcomp.errors import ConfigError
from hybridcomp.session import process

#: a line of the mesh, its row or column, through this rank: rank (i, j)'s ``row`` is ranks (i, 0)
#: to (i, q - 1)
Axis = Literal["row", "column"]

R = TypeVar("R")


@dataclass
class BroadcastUnderWay:
    """A pending broadcast; ``wait`` returns its tensor."""

    handle: Handle
    values: Tensor

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.values


class Mesh:
    """q * q ranks that share one replica of a model; this rank is at (``row``, ``column``).

    Attributes:
        q: ranks on a side.
        row, column: coordinates of this rank; its number in the mesh is ``row * q + column``.
        group: all ranks of the mesh, in that order.
    """

    def __init__(self, q: int, channels: Callable[[], Channels | None] | None = None) -> None:
        """Create the groups of all meshes; a collective over the job.

        Each ``q * q`` consecutive ranks are one mesh, so ranks that hold the same part of the model
        are equal modulo ``q * q``, as with DeepSpeed's and megatron-core's tensor ranks.

        Args:
            q: ranks on a side of a mesh.
            channels: returns the channels of the messages, None for native ones; by default this
                process's, from a DeepSpeed engine or from ``hybridcomp.install``.

        Raises ConfigError if ``q * q`` does not divide the number of ranks.
        """
        world_size = dist.get_world_size()
        if q < 1 or world_size % (q * q):
            given = Shown(f"{world_size} ranks for meshes of {q} x {q}")
            raise ConfigError("tp2d", given, f"expected a multiple of {q * q}; change either")
        self.q = q
        self._channels = channels or process.current
        number = dist.get_rank() % (q * q)
        self.row, self.column = divmod(number, q)
        first = dist.get_rank() - number
        self._groups: dict[Axis, ProcessGroup] = {}
        self._known: dict[Axis, Group] = {}
        for start in range(0, world_size, q * q):
            lines = [range(q * at, q * (at + 1)) for at in range(q)]
            columns = [range(at, q * q, q) for at in range(q)]
            whole = dist.new_group([start + member for member in range(q * q)])
            rows_made = [dist.new_group([start + m for m in line]) for line in lines]
            columns_made = [dist.new_group([start + m for m in line]) for line in columns]
            if start == first:
                self.group: ProcessGroup = whole
                self._groups["row"] = rows_made[self.row]
                self._groups["column"] = columns_made[self.column]

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Return this mesh: a copy of a model, for averaged weights, shares its groups."""
        return self

    @property
    def rank(self) -> int:
        return self.row * self.q + self.column

    def place(self, axis: Axis) -> int:
        """Return this rank's position on a line: in its row, ``column``; in its column, ``row``."""
        return self.column if axis == "row" else self.row

    def channel(self) -> Channel | None:
        """Return the channel ``tp2d``; None without a block."""
        channels = self._channels()
        return None if channels is None else channels["tp2d"]

    def part(self, whole: Tensor) -> Tensor:
        """Return this row's part of a batch, (B, ...) to (B / q, ...), a view.

        Raises ConfigError if the batch cannot be cut evenly.
        """
        if whole.shape[0] % self.q:
            todo = f"expected a multiple of {self.q}, the rows of the mesh; change the batch size"
            raise ConfigError("tp2d", Shown(f"a batch of {whole.shape[0]} samples"), todo)
        return whole.chunk(self.q)[self.row]

    def broadcast(
        self, values: Tensor, root: int, axis: Axis, kind: Direction
    ) -> BroadcastUnderWay:
        """Broadcast ``values`` (1-D, contiguous) from position ``root`` of this rank's line."""
        message = Broadcast(
            numel=values.numel(), dtype=values.dtype, group=self._groups[axis], direction=kind,
            values=values, root=root,
        )  # fmt: skip
        return BroadcastUnderWay(
            *self._run(message, lambda: message.native(self._group(axis), Meter()))
        )

    def reduce(
        self, values: Tensor, out: Tensor | None, root: int, axis: Axis, kind: Direction
    ) -> Handle:
        """Sum the ``values`` (1-D, contiguous) of a line's ranks into ``out`` of rank ``root``."""
        message = Reduce(
            numel=values.numel(), dtype=values.dtype, group=self._groups[axis], direction=kind,
            values=values, out=out, root=root,
        )  # fmt: skip
        return self._run(message, lambda: message.native(self._group(axis), Meter()))

    def _run(self, message: Message[R], native: Callable[[], R]) -> R:
        channel = self.channel()
        if channel is None:
            return native()
        return channel.run(message, native=native, encoded=lambda result: result)

    def gather(self, values: Tensor, axis: Axis, kind: Direction) -> Tensor:
        """All-gather the ``values`` of a line's ranks, stacked in a new first dimension: (q, ...).

        It is native and exact: for short tensors such as vectors, statistics and losses.
        """
        known, flat = self._group(axis), values.detach().contiguous().reshape(-1)
        out = flat.new_empty(self.q * flat.numel())
        if self.q == 1:
            out.copy_(flat)
        else:
            meter = Meter()
            transfer(lambda: transport.all_gather(out, flat, known, meter), meter)
            self._native(native_nbytes.all_gather_nbytes(flat.numel(), flat.dtype, self.q), kind)
        return out.view(self.q, *values.shape)

    def scatter_sum(self, values: Tensor, axis: Axis, kind: Direction) -> Tensor:
        """Reduce-scatter ``values`` (q, n) over a line's ranks, in rank order; return (n,).

        It is native and exact like ``gather``, and adds in fp32 or wider for any floating dtype.
        """
        wide = values.detach().to(torch.promote_types(values.dtype, torch.float32)).contiguous()
        out = torch.empty_like(wide)
        if self.q == 1:
            out.copy_(wide)
        else:
            splits, meter = [wide[0].numel()] * self.q, Meter()
            sent = wide.view(-1), splits, splits, self._group(axis), meter
            transfer(lambda: transport.all_to_all(out.view(-1), *sent), meter)
            numel = wide.numel()
            self._native(native_nbytes.all_to_all_nbytes(numel, wide.dtype, self.q), kind)
        total = out[0].clone()
        for row in out[1:]:
            total += row
        return total.to(values.dtype)

    def _native(self, nbytes: int, kind: Direction) -> None:
        channel = self.channel()
        if channel is not None:
            channel.count_native(nbytes, kind)

    def _group(self, axis: Axis) -> Group:
        if axis not in self._known:
            self._known[axis] = Group.of(self._groups[axis])
        return self._known[axis]


def fail_unless(inside: Tensor, what: str) -> None:
    """Raise the error of an out-of-range index unless the scalar ``inside`` is true."""
    if inside.is_cuda:  # the host does not wait for a GPU
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(f"index out of range: {what}")
