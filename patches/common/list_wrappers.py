"""Replace ``all_gather`` and ``reduce_scatter`` of lists of tensors, which may differ in length.

The shards of ``collective_wrappers`` are equally long parts of one tensor.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import AllGather, Channel, Message, ReduceScatter, native_nbytes
from hybridcomp.codecs.base import Codec
from hybridcomp.patches.common.collective_wrappers import Maker, flat, put
from hybridcomp.patches.common.routes import Layers
from hybridcomp.seams.around import around


@dataclass(eq=False, kw_only=True)
class AllGatherParts(Message[None]):
    """Gather shards of unequal length into ``parts``; ``numel`` is the mean of the lengths.

    Shards are padded to the longest for the exchange, so that all ranks decode the same bytes.
    """

    tensor: Tensor
    parts: MutableSequence[Tensor]

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of this rank's shard, sent to each other rank."""
        return native_nbytes.all_gather_nbytes(self.tensor.numel(), self.dtype, size)

    def send(self, channel: Channel, codec: Codec) -> None:
        """Gather the padded shards and write the parts."""
        tensor, parts = self.tensor, self.parts
        longest = max(part.numel() for part in parts)
        out = tensor.new_zeros(len(parts) * longest)
        places = torch.split(out, longest) if longest else [out] * len(parts)
        own = places[dist.get_rank(self.group)]
        own[: tensor.numel()].copy_(flat(tensor))
        padded = _Padded(
            numel=self.numel, dtype=self.dtype, group=self.group, direction=self.direction,
            shard=own, out=out, native_numel=tensor.numel(),
        )  # fmt: skip
        padded.send(channel, codec)
        for index, (part, place) in enumerate(zip(parts, places, strict=True)):
            values = place[: part.numel()]
            if part.data_ptr() == tensor.data_ptr():
                # GPT-NeoX puts its input into this part: other code may read it, so its values are
                # kept
                parts[index] = values.view(part.shape)
            else:
                put(values, part)


@dataclass(eq=False, kw_only=True)
class _Padded(AllGather):
    """All-gather of padded shards; native would send only their first ``native_numel`` elements."""

    native_numel: int

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the shard without its padding."""
        return native_nbytes.all_gather_nbytes(self.native_numel, self.dtype, size)


def make_all_gather_list(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_gather``, also of shards of unequal length (experts)."""

    @around
    def all_gather(
        original: Any,
        tensor_list: MutableSequence[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        channel = None if async_op else layers.channel(group)
        if channel is None:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        message = AllGatherParts(
            numel=sum(part.numel() for part in tensor_list) // len(tensor_list),
            dtype=tensor.dtype, group=group, direction=layers.way(), tensor=tensor,
            parts=tensor_list,
        )  # fmt: skip
        return channel.run(
            message,
            native=lambda: original(tensor_list, tensor, group=group, async_op=async_op),
            encoded=lambda handle: None,
        )

    return all_gather


def make_reduce_scatter_list(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.reduce_scatter`` of shards of unequal length."""

    @around
    def reduce_scatter_list(
        original: Any,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        plain = op == dist.ReduceOp.SUM and not async_op
        channel = layers.channel(group) if plain else None
        if channel is None:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        message = ReduceScatter(
            numel=sum(part.numel() for part in input_list), dtype=output.dtype, group=group,
            direction=layers.way(), shards=[flat(part) for part in input_list],
        )  # fmt: skip
        return channel.run(
            message,
            native=lambda: original(output, input_list, op=op, group=group, async_op=async_op),
            encoded=lambda handle: put(handle.wait(), output),
        )

    return reduce_scatter_list
