"""Fill the slots of an FSDP2 group with an encoded all-gather, reduce-scatter and all-reduce.

All of them run on the stream that FSDP has made current, and are complete there when they return,
except gathers that FSDP calls asynchronously.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hybridcomp import channels
from hybridcomp.channels import Channel, ReduceScatterHandle, parameter_deltas
from hybridcomp.channels.pieces import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.fsdp2_kept import KeptGather
from hybridcomp.patches.torch.fsdp2_members import Members
from hybridcomp.patches.torch.session import say
from hybridcomp.patches.torch.stateful import BETWEEN


def fill(members: Members, attached: Attached, native_inside: bool) -> None:
    """Put encoded collectives into the slots of one group.

    Torch's two setters refuse a module with several groups, as the group would be ambiguous; here
    every group gets separate objects, so the attributes behind the setters are set directly.

    Args:
        native_inside: with replicas, reduce-scatter gradients natively inside a shard group, as the
            all-reduce between replicas encodes.
    """
    group, replicas = members.group, members.replicas
    group._all_gather_comm = EncodedAllGather(members, attached, group._all_gather_comm)
    native_inside = native_inside and replicas is not None
    scatter = EncodedReduceScatter(members, attached, group._reduce_scatter_comm, native_inside)
    group._reduce_scatter_comm = scatter
    if replicas is not None:
        # a copy: groups may share one mesh_info object
        encoded = EncodedReplicas(replicas, scatter, group.mesh_info)
        group.mesh_info = copy.copy(group.mesh_info)
        group.mesh_info.replicate_process_group = encoded
    members.follow_messages()


def empty(members: Members) -> None:
    """Restore the objects that ``fill`` replaced, except in slots that were changed since."""
    group = members.group
    gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
    replicas = getattr(group.mesh_info, "replicate_process_group", None)
    if isinstance(gather, EncodedAllGather):
        group._all_gather_comm = gather.native
    if isinstance(scatter, EncodedReduceScatter):
        group._reduce_scatter_comm = scatter.native
    if isinstance(replicas, EncodedReplicas):
        group.mesh_info = replicas.mesh_info
    members.unwatch()


def is_filled(group: Any) -> bool:
    """Return whether the slots of one of torch's parameter groups hold encoded collectives."""
    gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
    return isinstance(gather, EncodedAllGather) and isinstance(scatter, EncodedReduceScatter)


class GatherWork(dist.Work):
    """Handle as a ``Work``, the type that FSDP waits for."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until everything is decoded."""
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether ``wait`` has finished."""
        return self._handle.is_completed()


@dataclass(eq=False, kw_only=True)
class _ParameterGather(channels.AllGather):
    """All-gather of a group's parameters.

    Attributes:
        stays_exact: returns whether it must not be lossy.
        kept: gathers steps, where torch keeps what was gathered.
        held: what this rank held after the last gather, where all ranks have steps to send.
    """

    members: Members
    stays_exact: Callable[[], bool]
    kept: KeptGather
    held: Tensor | None = None

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether the gather must be exact and the codec is not, or has no reference."""
        if codec.references:
            self.held = self.kept.prepare(self.out, self.group)
            return self.held is None
        return not codec.lossless and self.stays_exact()

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Gather encoded shards, or steps from what was gathered last."""
        if self.held is None:
            return super().send(channel, codec)
        rows = self.out.view(-1, self.shard.numel())
        return parameter_deltas.gather_steps(channel, rows, self.held, codec, self.group)

    def cuts(self, codec: Codec) -> Sequence[int]:
        """Return the borders of parameters in the shard, which no lossy codec crosses."""
        return () if codec.lossless else self.members.cuts(self.out.numel() // self.shard.numel())


#: torch's collective of a slot
Native = TypeVar("Native", bound="AllGather | ReduceScatter")


class _EncodedSlot(Generic[Native]):
    """Collective in a slot of a group, beside torch's own, which it replaces."""

    native: Native

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as the replaced collective does."""
        return self.native.allocate(size, dtype=dtype, device=device)


class EncodedAllGather(_EncodedSlot[AllGather], AllGather):
    """All-gather of the parameters of one group, encoded where the policy says so."""

    def __init__(self, members: Members, attached: Attached, native: AllGather) -> None:
        self._members, self._attached, self.native = members, attached, native
        self._channel: Channel = attached.channels["zero"]
        self._kept = KeptGather(members, self._channel)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather all ranks' ``input_tensor``, here a view of ``output_tensor``, into the latter."""
        message = _ParameterGather(
            numel=output_tensor.numel(), dtype=output_tensor.dtype, group=group,
            shard=input_tensor.detach(), out=output_tensor.detach(), async_op=async_op,
            single_post=True, members=self._members, stays_exact=self._stays_exact,
            kept=self._kept,
        )  # fmt: skip
        return self._channel.run(
            message,
            native=lambda: self.native(output_tensor, input_tensor, group, async_op),
            encoded=lambda handle: GatherWork(handle) if async_op else None,
        )

    def _stays_exact(self) -> bool:
        """Return whether this gather must be exact: it repeats one, or is outside of passes."""
        state = self._members.group
        if state.is_sharded_post_forward:
            say(
                "zero: backward gathers with reshard_after_forward=N stay native: they bring back "
                "what the forward pass has decoded"
            )
            return True
        if state._training_state == TrainingState.IDLE and not self._is_for_a_pass():
            say(
                "zero: unshard() outside of forward and backward passes gathers exact parameters, "
                "natively"
            )
            return True
        return False

    def _is_for_a_pass(self) -> bool:
        """Return whether an explicit ``unshard()`` serves several passes of a training step.

        Losses in chunks (torchtitan) do so: the head is gathered between the passes of the layers,
        and kept, with its gradients, until all chunks are done. In the first step the forward pass
        has gathered it already, encoded; exact parameters in later steps would differ from that.
        """
        group = self._members.group
        keeps = not (group.reduce_grads or group.reshard_after_backward)
        return keeps and self._attached.is_open


class EncodedReduceScatter(_EncodedSlot[ReduceScatter], ReduceScatter):
    """Reduce-scatter of the gradients of one group, encoded where the policy says so."""

    def __init__(
        self, members: Members, attached: Attached, native: ReduceScatter, native_inside: bool
    ) -> None:
        self.members, self.attached, self.native = members, attached, native
        self._native_inside = native_inside
        self.channel: Channel = attached.channels["dp"]
        self.places: tuple[int, ...] = ()  # parameters of the last message

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
        message = _GradientScatter(
            numel=input_tensor.numel(), dtype=input_tensor.dtype, group=group,
            shards=channels.Shards(input_tensor.detach(), output_tensor.numel()),
            members=self.members, places=self.places, ranks=group.size(),
        )  # fmt: skip

        def native() -> dist.Work | None:
            return self.native(output_tensor, input_tensor, group, op, async_op)

        def deliver(handle: ReduceScatterHandle) -> None:
            output_tensor.copy_(divided(handle.wait(), op, self.members.group, group.size()))

        if self._native_inside:
            return self.channel.run_native(message, native)
        return self.channel.run(message, native=native, encoded=deliver)


@dataclass(eq=False, kw_only=True)
class _GradientScatter(channels.ReduceScatter):
    """Reduce-scatter of the gradients of some parameters of a group."""

    members: Members
    places: tuple[int, ...]
    ranks: int

    def pieces(self) -> Sequence[Sequence[Piece]]:
        """Return the parameters' parts in each rank's shard."""
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

        def deliver(handle: Handle) -> GatherWork:
            handle.wait()
            total = divided(tensor, options.reduceOp, scatter.members.group, self.inner.size())
            tensor.copy_(total)
            return GatherWork(handle)

        return scatter.channel.run(
            message, native=lambda: self.inner.allreduce(tensors, options), encoded=deliver
        )

    def _pieces(self, numel: int) -> list[Piece]:
        """Return the pieces of this rank's shard of the last reduce-scatter."""
        members, places = self._scatter.members, self._scatter.places
        size, rank = members.place
        if size == 1:  # no reduce-scatter came before
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
    """Divide the sum ``total`` as ``op`` would have done; in place."""
    if op == dist.ReduceOp.AVG:
        return total.div_(world_size)
    if op == dist.ReduceOp.PREMUL_SUM:  # its factor cannot be read; it is the group's
        return total.div_(group.gradient_divide_factor)
    assert op == dist.ReduceOp.SUM, f"FSDP2 reduces with {op}"
    return total
