"""Tensor-parallel collectives of megatron-core's local layers.

The raw collectives and not ``_reduce`` and its neighbours: half of the bytes are the input
gradients of ``LinearWithGradAccumulationAndAsyncCommunication.backward``, which calls
``torch.distributed.all_reduce`` itself and overlaps it with the weight gradient. So the globals
through which ``mappings`` and ``layers`` reach torch.distributed are replaced, and the overlap, the
buffers and the autograd functions stay upstream's. Not the public wrappers either: modules bind
them early.

Of ``layers``: what is gathered is an input (``forward``, also where the backward pass gathers it a
second time, which must give the same values), what is reduced is its gradient. Of ``mappings``: the
``backward`` methods are marked.

Exact, because in other modules: cross-entropy, norms, clipping, reductions of embedding gradients.
Exact, because of other groups: token counts and losses of MoE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.collectives.native import (
    all_gather_nbytes,
    all_reduce_nbytes,
    reduce_scatter_nbytes,
)
from hybridcomp.patches.mcore_attach import REQUIREMENT
from hybridcomp.patches.mcore_calls import (
    Route,
    direction,
    flat,
    make_backward,
    make_torch,
    route,
    torch_seam,
)
from hybridcomp.patches.mcore_ep import make_all_to_all_single
from hybridcomp.patches.mcore_groups import dimension_of
from hybridcomp.patching import Seam
from hybridcomp.policy import Direction

MAPPINGS = "megatron.core.tensor_parallel.mappings"
LAYERS = "megatron.core.tensor_parallel.layers"

GATHER_PARAMETERS = ("output_tensor", "input_tensor", "group", "async_op")
SCATTER_PARAMETERS = ("output", "input", "op", "group", "async_op")

Collective = Callable[..., Any]
Way = Callable[[], Direction]


def _route(
    numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None, raw_nbytes: int, way: Way
) -> Route | None:
    return route(dimension_of(group, "tp"), numel, dtype, group, raw_nbytes, way())


def make_all_reduce(way: Way) -> Callable[[Collective], Collective]:
    """``torch.distributed.all_reduce``; the direction is asked at every call."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def all_reduce(
            tensor: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            raw = all_reduce_nbytes(tensor.numel(), tensor.dtype, dist.get_world_size(group))
            found = (
                _route(tensor.numel(), tensor.dtype, group, raw, way)
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


def make_all_gather_into_tensor(way: Way) -> Callable[[Collective], Collective]:
    """``dist_all_gather_func``."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def all_gather_into_tensor(
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            numel, dtype = input_tensor.numel(), input_tensor.dtype
            raw = all_gather_nbytes(numel, dtype, dist.get_world_size(group))
            found = _route(numel, dtype, group, raw, way)
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


def make_reduce_scatter_tensor(way: Way) -> Callable[[Collective], Collective]:
    """``dist_reduce_scatter_func``."""

    def make(original: Collective) -> Collective:
        @functools.wraps(original)
        def reduce_scatter_tensor(
            output: Tensor,
            input: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            raw = reduce_scatter_nbytes(input.numel(), input.dtype, dist.get_world_size(group))
            found = (
                _route(input.numel(), input.dtype, group, raw, way)
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


def make_all_gather_list(original: Collective) -> Collective:
    """``torch.distributed.all_gather`` of shards of unequal length (experts with tensor parallel).

    Shards are padded to the longest for the exchange, so that all ranks decode the same bytes.
    """

    @functools.wraps(original)
    def all_gather(
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        world_size, me = len(tensor_list), dist.get_rank(group)
        longest = max(part.numel() for part in tensor_list)
        raw = all_gather_nbytes(tensor.numel(), tensor.dtype, world_size)
        total = sum(part.numel() for part in tensor_list)
        found = None if async_op else _route(total, tensor.dtype, group, raw, direction)
        if found is None:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        out = tensor.new_zeros(world_size * longest)
        places = torch.split(out, longest) if longest else [out] * world_size
        places[me][: tensor.numel()].copy_(flat(tensor))
        found.channel.all_gather(
            places[me], out, found.codec, group, raw_nbytes=raw, direction=found.direction
        )
        for part, place in zip(tensor_list, places, strict=True):
            _put(place[: part.numel()], part)
        return None

    return all_gather


def make_reduce_scatter_list(original: Collective) -> Collective:
    """``torch.distributed.reduce_scatter`` of shards of unequal length."""

    @functools.wraps(original)
    def reduce_scatter_list(
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        total, dtype = sum(part.numel() for part in input_list), output.dtype
        raw = reduce_scatter_nbytes(total, dtype, len(input_list))
        plain = op == dist.ReduceOp.SUM and not async_op
        found = _route(total, dtype, group, raw, direction) if plain else None
        if found is None:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        handle = found.reduce_scatter([flat(p) for p in input_list], group, async_op=False)
        _put(handle.wait(), output)
        return None

    return reduce_scatter_list


def _put(values: Tensor, out: Tensor) -> None:
    """Write flat ``values`` into ``out``, whatever its shape and dtype."""
    target = out.detach()
    target.copy_(values.view(target.shape))


def _forward() -> Direction:
    return "forward"


def _backward() -> Direction:
    return "backward"


def _function(module: str, name: str, parameters: tuple[str, ...]) -> Seam:
    return Seam(requirement=REQUIREMENT, module=module, qualname=name, parameters=parameters)


#: autograd functions of ``mappings`` whose backward pass communicates
FUNCTIONS = (
    "_CopyToModelParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ScatterToSequenceParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ReduceScatterToSequenceParallelRegion",
    "_AllGatherFromTensorParallelRegion",
    "_ReduceScatterToTensorParallelRegion",
)

COVERS = ("tp",)
PATCHES = (
    (
        torch_seam(MAPPINGS),
        make_torch(
            {
                "all_reduce": make_all_reduce(direction),
                "all_gather": make_all_gather_list,
                "reduce_scatter": make_reduce_scatter_list,
                "all_to_all_single": make_all_to_all_single,
            }
        ),
    ),
    (
        _function(MAPPINGS, "dist_all_gather_func", GATHER_PARAMETERS),
        make_all_gather_into_tensor(direction),
    ),
    (
        _function(MAPPINGS, "dist_reduce_scatter_func", SCATTER_PARAMETERS),
        make_reduce_scatter_tensor(direction),
    ),
    *(
        (_function(MAPPINGS, f"{name}.backward", ("ctx", "grad_output")), make_backward)
        for name in FUNCTIONS
    ),
    (torch_seam(LAYERS), make_torch({"all_reduce": make_all_reduce(_backward)})),
    (
        _function(LAYERS, "dist_all_gather_func", GATHER_PARAMETERS),
        make_all_gather_into_tensor(_forward),
    ),
    (
        _function(LAYERS, "dist_reduce_scatter_func", SCATTER_PARAMETERS),
        make_reduce_scatter_tensor(_backward),
    ),
)
