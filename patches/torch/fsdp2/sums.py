"""Reduce-scatter of the gradients of an FSDP2 group, and the all-reduce between its replicas.

They run on the stream that FSDP has made current, and have completed there when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from hybridcomp import channels
from hybridcomp.channels import Channel, ReduceScatterHandle
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.collectives import Handle
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.fsdp2.members import Members
from hybridcomp.patches.torch.fsdp2.slot import HandleWork
from hybridcomp.patches.torch.state.stateful import BETWEEN


class EncodedReduceScatter(ReduceScatter):
    """Reduce-scatter of the gradients of one group, encoded where the policy says so."""

    def __init__(
        self, members: Members, attached: Attached, native: ReduceScatter, native_inside: bool
    ) -> None:
        self.members, self.attached, self.native = members, attached, native
        self._native_inside = native_inside
        self.channel: Channel = attached.channels["dp"]
        self.places: tuple[int, ...] = ()  # parameters of the last message

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as torch's collective does."""
        return self.native.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Put this rank's part of the sum over ``group`` into ``output_tensor``."""
        self.attached.reduced()
        self.places = self.members.of_message(input_tensor.numel(), group.size())
        self._forget_zeroed()
        message = _GradientScatter(
            numel=input_tensor.numel(), dtype=input_tensor.dtype, group=group,
            shards=channels.Shards(input_tensor.detach(), output_tensor.numel()),
            members=self.members, places=self.places, ranks=group.size(),
            crosses=bool(self.members.group.all_reduce_grads),
        )  # fmt: skip

        def native() -> dist.Work | None:
            return self.native(output_tensor, input_tensor, group, op, async_op)

        def deliver(handle: ReduceScatterHandle) -> None:
            output_tensor.copy_(divided(handle.wait(), op, self.members.group, group.size()))

        if self._native_inside:
            return self.channel.run_native(message, native)
        return self.channel.run(message, native=native, encoded=deliver)

    def _forget_zeroed(self) -> None:
        """Drop the node's kept sums of parameters whose gradients were set to None.

        After the first micro-batch a parameter with a kept sum has zeros as its gradient, not None.
        """
        sums, members = self.channel.state.node_sums, self.members
        if sums.has_kept:
            both = zip(members.members, members.sharded, strict=True)
            sums.drop({member.name for member, parameter in both if parameter.grad is None})

    def unused(self) -> set[str]:
        """Return the parameters whose kept sums must be sent in a step's last micro-batch."""
        if not self.members.group.all_reduce_grads:
            return set()
        self._forget_zeroed()
        return self.channel.state.node_sums.left


@dataclass(eq=False, kw_only=True)
class _GradientScatter(channels.ReduceScatter):
    """Reduce-scatter of the gradients of some parameters of a group."""

    members: Members
    places: tuple[int, ...]
    ranks: int

    def pieces(self) -> Sequence[Sequence[Piece]]:
        """Return, for each rank's shard, the parts of parameters in it."""
        return self.members.pieces(self.places, self.ranks)


class EncodedReplicas(dist.ProcessGroup):
    """Process group of an HSDP mesh's replicas, whose ``allreduce`` encodes.

    HSDP sums the shards between its replicas with ``torch.distributed.all_reduce`` over the process
    group of the mesh, without a slot. Upstream decides when it does so
    (``set_requires_all_reduce``) and by what it divides.
    """

    def __init__(
        self, inner: dist.ProcessGroup, scatter: EncodedReduceScatter, mesh_info: Any
    ) -> None:
        """Wrap ``inner``; ``mesh_info``: torch's object, which ``empty`` restores in the group."""
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._scatter, self.mesh_info = inner, scatter, mesh_info

    def getBackendName(self) -> str:
        """Return the backend of the wrapped group, which sends."""
        return str(dist.get_backend(self.inner))

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Sum one tensor over the replicas in place."""
        (tensor,) = tensors
        scatter = self._scatter
        scatter.attached.reduced()
        message = _ShardSum(
            numel=tensor.numel(), dtype=tensor.dtype, group=self.inner, values=tensor,
            pieces_of=self._pieces,
        )  # fmt: skip

        def deliver(handle: Handle) -> HandleWork:
            handle.wait()
            total = divided(tensor, options.reduceOp, scatter.members.group, self.inner.size())
            tensor.copy_(total)
            return HandleWork(handle)

        return scatter.channel.run(
            message, native=lambda: self.inner.allreduce(tensors, options), encoded=deliver
        )

    def _pieces(self, numel: int) -> list[Piece]:
        """Return the pieces of this rank's shard of the last reduce-scatter."""
        members, places = self._scatter.members, self._scatter.places
        size, rank = members.place
        if size == 1:  # no reduce-scatter has run yet
            places = members.of_message(numel, 1)
        pieces = members.pieces(places, size)[rank]
        return [Piece(BETWEEN + p.name if p.name else "", p.offset, p.numel) for p in pieces]


@dataclass(eq=False, kw_only=True)
class _ShardSum(channels.AllReduce):
    """All-reduce of a shard between replicas."""

    pieces_of: Callable[[int], list[Piece]]

    def pieces(self) -> list[Piece]:
        """Return the parameters' parts in the shard."""
        return self.pieces_of(self.numel)


def divided(total: Tensor, op: Any, group: Any, world_size: int) -> Tensor:
    """Divide the sum ``total`` in place, as the native reduction ``op`` would have done."""
    if op == dist.ReduceOp.AVG:
        return total.div_(world_size)
    if op == dist.ReduceOp.PREMUL_SUM:  # its factor cannot be read, but equals the group's
        return total.div_(group.gradient_divide_factor)
    assert op == dist.ReduceOp.SUM, f"FSDP2 reduces with {op}"
    return total
