"""Wrap the collectives of torch.distributed that layers call, so that their messages are encoded.

Layers of megatron-core, GPT-NeoX and DeepSpeed call the same functions of torch.distributed, or
functions of the same names in other modules; each seam module has a ``routes.Layers`` that gives
dimension, direction and channels of their messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Shards,
)
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle, ReduceScatterHandle
from hybridcomp.patches.common.routes import Layers
from hybridcomp.seams.around import around

Collective = Callable[..., Any]
Maker = Callable[[Collective], Collective]

#: numel for messages with splits, whose lengths differ: no ``min_bytes`` is above it
ANY_NUMEL = sys.maxsize // 8


def flat(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor``, 1-D and contiguous: as a view if possible."""
    return tensor.detach().contiguous().view(-1)


def put(values: Tensor, out: Tensor) -> None:
    """Write flat ``values`` into ``out``, whatever its shape and dtype."""
    target = out.detach()
    target.copy_(values.view(target.shape))


@dataclass(eq=False, kw_only=True)
class AllReduceInPlace(AllReduce):
    """Sum of a tensor of any shape and strides, in place."""

    tensor: Tensor

    def load(self, codec: Codec) -> Tensor:
        """Return the flat values, a copy where the tensor is not contiguous."""
        self.values = flat(self.tensor)
        return self.values

    def finish(self, handle: Handle) -> Handle | None:
        """Return the handle that also writes the sum back; None if no collective was started."""
        values, tensor = self.values, self.tensor
        if values is not None and values.data_ptr() != tensor.data_ptr():
            handle.then(lambda: put(values, tensor))
        return handle if self.async_op else None


def make_all_reduce(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_reduce``; each call looks dimension and direction up again."""

    @around
    def all_reduce(
        original: Any,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        channel = layers.channel(group) if op == dist.ReduceOp.SUM else None
        if channel is None:
            return original(tensor, op=op, group=group, async_op=async_op)
        message = AllReduceInPlace(
            numel=tensor.numel(), dtype=tensor.dtype, group=group, direction=layers.way(),
            tensor=tensor, async_op=async_op,
        )  # fmt: skip
        return channel.run(
            message,
            native=lambda: original(tensor, op=op, group=group, async_op=async_op),
            encoded=message.finish,
        )

    return all_reduce


def make_all_gather_into_tensor(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_gather_into_tensor``."""

    @around
    def all_gather_into_tensor(
        original: Any,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        channel = layers.channel(group)
        if channel is None:
            return original(output_tensor, input_tensor, group=group, async_op=async_op)
        message = AllGather(
            numel=input_tensor.numel(), dtype=input_tensor.dtype, group=group,
            direction=layers.way(), shard=flat(input_tensor),
            out=output_tensor.detach().view(-1), async_op=async_op,
        )  # fmt: skip
        return channel.run(
            message,
            native=lambda: original(output_tensor, input_tensor, group=group, async_op=async_op),
            encoded=lambda handle: handle if async_op else None,
        )

    return all_gather_into_tensor


def make_reduce_scatter_tensor(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.reduce_scatter_tensor``."""

    @around
    def reduce_scatter_tensor(
        original: Any,
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        channel = layers.channel(group) if op == dist.ReduceOp.SUM else None
        if channel is None:
            return original(output, input, op=op, group=group, async_op=async_op)
        message = ReduceScatter(
            numel=input.numel(), dtype=input.dtype, group=group, direction=layers.way(),
            shards=Shards(flat(input), output.numel()), async_op=async_op,
        )  # fmt: skip

        def deliver(handle: ReduceScatterHandle) -> ReduceScatterHandle | None:
            handle.then(lambda: put(handle.wait(), output))
            return handle if async_op else None

        return channel.run(
            message,
            native=lambda: original(output, input, op=op, group=group, async_op=async_op),
            encoded=deliver,
        )

    return reduce_scatter_tensor


def make_all_to_all_single(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_to_all_single``; splits count rows.

    With splits the length of a message differs from rank to rank and must not decide its codec:
    ``min_bytes`` does not apply, and vectors stay native.
    """

    @around
    def all_to_all_single(
        original: Any,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        def native() -> Any:
            return original(
                output,
                input,
                output_split_sizes=output_split_sizes,
                input_split_sizes=input_split_sizes,
                group=group,
                async_op=async_op,
            )

        channel = layers.channel(group)
        if channel is None:
            return native()
        uneven = input_split_sizes is not None or output_split_sizes is not None
        message = AllToAll(
            numel=ANY_NUMEL if uneven else input.numel(), dtype=input.dtype, group=group,
            direction=layers.way(), values=input, out=output.detach().view(-1),
            in_splits=input_split_sizes, out_splits=output_split_sizes,
            row=input.shape[1:].numel(), async_op=async_op,
        )  # fmt: skip
        if uneven and input.dim() < 2:
            return channel.run_native(message, native)
        return channel.run(
            message, native=native, encoded=lambda handle: handle if async_op else None
        )

    return all_to_all_single
