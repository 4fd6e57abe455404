"""Replace the collectives that layers call in torch.distributed by ones that encode.

Layers of megatron-core, GPT-NeoX and DeepSpeed call the same functions of torch.distributed, or
functions of the same names in other modules; each seam module has a ``routes.Layers`` that gives
dimension, direction and channels of their messages.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import native_nbytes
from hybridcomp.patches.common.routes import Layers, flat

Collective = Callable[..., Any]
Maker = Callable[[Collective], Collective]

#: numel for messages with splits, whose lengths differ: no ``min_bytes`` is above it
ANY_NUMEL = sys.maxsize // 8


def make_all_reduce(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_reduce``; every call reads dimension and direction again."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def all_reduce(
            tensor: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            raw = native_nbytes.all_reduce_nbytes(
                tensor.numel(), tensor.dtype, dist.get_world_size(group)
            )
            found = (
                layers.route(tensor.numel(), tensor.dtype, group, raw)
                if op == dist.ReduceOp.SUM
                else None
            )
            if found is None:
                return original(tensor, op=op, group=group, async_op=async_op)
            values = flat(tensor)
            handle = found.channel.all_reduce(
                values,
                found.codec,
                group,
                raw_nbytes=raw,
                direction=found.direction,
                async_op=async_op,
            )
            if values.data_ptr() != tensor.data_ptr():
                handle.then(lambda: _put(values, tensor))
            return handle if async_op else None

        return all_reduce

    return make


def make_all_gather_into_tensor(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_gather_into_tensor``."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def all_gather_into_tensor(
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            numel, dtype = input_tensor.numel(), input_tensor.dtype
            raw = native_nbytes.all_gather_nbytes(numel, dtype, dist.get_world_size(group))
            found = layers.route(numel, dtype, group, raw)
            if found is None:
                return original(output_tensor, input_tensor, group=group, async_op=async_op)
            handle = found.channel.all_gather(
                flat(input_tensor),
                output_tensor.detach().view(-1),
                found.codec,
                group,
                raw_nbytes=raw,
                direction=found.direction,
                async_op=async_op,
            )
            return handle if async_op else None

        return all_gather_into_tensor

    return make


def make_reduce_scatter_tensor(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.reduce_scatter_tensor``."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def reduce_scatter_tensor(
            output: Tensor,
            input: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            raw = native_nbytes.reduce_scatter_nbytes(
                input.numel(), input.dtype, dist.get_world_size(group)
            )
            found = (
                layers.route(input.numel(), input.dtype, group, raw)
                if op == dist.ReduceOp.SUM
                else None
            )
            if found is None:
                return original(output, input, op=op, group=group, async_op=async_op)
            shards = torch.split(flat(input), output.numel())
            handle = found.reduce_scatter(shards, group, async_op=async_op)
            handle.then(lambda: _put(handle.wait(), output))
            return handle if async_op else None

        return reduce_scatter_tensor

    return make


def make_all_gather_list(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_gather``, also of shards of unequal length (experts).

    Shards are padded to the longest for the exchange, so that all ranks decode the same bytes.
    """

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def all_gather(
            tensor_list: MutableSequence[Tensor],
            tensor: Tensor,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            world_size, me = len(tensor_list), dist.get_rank(group)
            longest = max(part.numel() for part in tensor_list)
            mean = sum(part.numel() for part in tensor_list) // world_size
            raw = native_nbytes.all_gather_nbytes(tensor.numel(), tensor.dtype, world_size)
            found = None if async_op else layers.route(mean, tensor.dtype, group, raw)
            if found is None:
                return original(tensor_list, tensor, group=group, async_op=async_op)
            out = tensor.new_zeros(world_size * longest)
            places = torch.split(out, longest) if longest else [out] * world_size
            places[me][: tensor.numel()].copy_(flat(tensor))
            found.channel.all_gather(
                places[me], out, found.codec, group, raw_nbytes=raw, direction=found.direction
            )
            for index, (part, place) in enumerate(zip(tensor_list, places, strict=True)):
                values = place[: part.numel()]
                if part.data_ptr() == tensor.data_ptr():
                    # GPT-NeoX puts the input there: other code may read it, so keep its values
                    tensor_list[index] = values.view(part.shape)
                else:
                    _put(values, part)
            return None

        return all_gather

    return make


def make_reduce_scatter_list(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.reduce_scatter`` of shards of unequal length."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def reduce_scatter_list(
            output: Tensor,
            input_list: Sequence[Tensor],
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            total, dtype = sum(part.numel() for part in input_list), output.dtype
            raw = native_nbytes.reduce_scatter_nbytes(total, dtype, len(input_list))
            plain = op == dist.ReduceOp.SUM and not async_op
            found = layers.route(total, dtype, group, raw) if plain else None
            if found is None:
                return original(output, input_list, op=op, group=group, async_op=async_op)
            handle = found.reduce_scatter([flat(p) for p in input_list], group, async_op=False)
            _put(handle.wait(), output)
            return None

        return reduce_scatter_list

    return make


def make_all_to_all_single(layers: Layers) -> Maker:
    """Wrap ``torch.distributed.all_to_all_single``; splits count rows.

    With splits the length of a message differs from rank to rank and must not decide its codec:
    ``min_bytes`` does not apply, and vectors stay native.
    """

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def all_to_all_single(
            output: Tensor,
            input: Tensor,
            output_split_sizes: Sequence[int] | None = None,
            input_split_sizes: Sequence[int] | None = None,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            gives = _elements(input, input_split_sizes)
            takes = _elements(output, output_split_sizes)
            uneven = gives is not None or takes is not None
            raw = (
                native_nbytes.all_to_all_nbytes(
                    input.numel(), input.dtype, dist.get_world_size(group)
                )
                if gives is None
                else native_nbytes.send_nbytes(
                    sum(gives) - gives[dist.get_rank(group)], input.dtype
                )
            )
            found = None
            if uneven and input.dim() < 2:
                layers.leave_native(group, raw)
            else:
                numel = ANY_NUMEL if uneven else input.numel()
                found = layers.route(numel, input.dtype, group, raw)
            if found is None:
                return original(
                    output,
                    input,
                    output_split_sizes=output_split_sizes,
                    input_split_sizes=input_split_sizes,
                    group=group,
                    async_op=async_op,
                )
            handle = found.channel.all_to_all(
                output.detach().view(-1),
                flat(input),
                found.codec,
                group,
                raw_nbytes=raw,
                out_splits=takes,
                in_splits=gives,
                direction=found.direction,
                async_op=async_op,
            )
            return handle if async_op else None

        return all_to_all_single

    return make


def _elements(tensor: Tensor, splits: Sequence[int] | None) -> list[int] | None:
    """Convert splits in rows to elements of the flat tensor."""
    if splits is None:
        return None
    row = tensor.shape[1:].numel()
    return [int(split) * row for split in splits]


def _put(values: Tensor, out: Tensor) -> None:
    """Write flat ``values`` into ``out``, whatever its shape and dtype."""
    target = out.detach()
    target.copy_(values.view(target.shape))
