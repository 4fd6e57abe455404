"""Gradient reduce-scatter of ZeRO stage 3, dimension ``dp``.

Seam: the name ``reduce_scatter_coalesced`` in module ``stage3``, which imported the function, so
replacing it in ``coalesced_collectives`` would change nothing. ``__avg_scatter_grads`` around it is
wrapped only to know which parameters are reduced.

Upstream pads every parameter to a multiple of the ranks with ``torch.empty`` and sends the padding
too; here nothing is padded, so undefined values never affect a codec's scale. The gradients are
divided by the number of ranks before the sum, as upstream does.

Not covered: ``reduce_scatter: false`` and qgZ, which the check of the config refuses or announces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, Channel, channels_of, native_nbytes
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patching import Seam

MODULE = "deepspeed.runtime.zero.stage3"

REDUCE_SCATTER = Seam(REQUIREMENT, MODULE, "reduce_scatter_coalesced", ("tensors", "group"))
AVG_SCATTER = Seam(
    REQUIREMENT,
    MODULE,
    "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    ("self", "params_to_reduce", "communication_data_type"),
)

#: the channel and the parameters whose gradients are being reduced
_reducing: ContextVar[tuple[Channel, Sequence[Any]] | None] = ContextVar(
    "hybridcomp_stage3", default=None
)


def make_avg_scatter_grads(original: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Publish the channel and the parameters whose gradients are reduced next."""

    @functools.wraps(original)
    def __avg_scatter_grads(
        self: Any, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        channels = channels_of(self)
        token = _reducing.set(None if channels is None else (channels["dp"], params_to_reduce))
        try:
            return original(self, params_to_reduce, communication_data_type)
        finally:
            _reducing.reset(token)

    return __avg_scatter_grads


def make_reduce_scatter_coalesced(
    original: Callable[..., list[Tensor]],
) -> Callable[..., list[Tensor]]:
    """Reduce-scatter gradients encoded; call upstream where there is no codec."""

    @functools.wraps(original)
    def reduce_scatter_coalesced(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
        reducing = _reducing.get()
        if reducing is None:
            return original(tensors, group)
        channel, params = reducing
        numel, dtype = sum(tensor.numel() for tensor in tensors), tensors[0].dtype
        world_size = dist.get_world_size(group)
        padded = sum(_chunk(tensor.numel(), world_size) * world_size for tensor in tensors)
        raw_nbytes = native_nbytes.reduce_scatter_nbytes(padded, dtype, world_size)
        codec = channel.codec(numel, dtype, group)
        if codec is None:
            channel.native(raw_nbytes)
            return original(tensors, group)
        return reduce_scatter(channel, tensors, params, codec, group, raw_nbytes)

    return reduce_scatter_coalesced


@torch.no_grad()
def reduce_scatter(
    channel: Channel,
    tensors: Sequence[Tensor],
    params: Sequence[Any],
    codec: Codec,
    group: Any,
    raw_nbytes: int,
) -> list[Tensor]:
    """Average this rank's part of every tensor over ``group``, in the tensors' dtype.

    1 lay out the parts by destination: rank r gets ``[r * chunk, (r + 1) * chunk)`` of each
    2 average: divide before the sum, as upstream does
    3 cut the sum of this rank's parts into one tensor per parameter
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    dtype = tensors[0].dtype
    # 1
    parts: list[list[Tensor]] = []
    pieces: list[list[Piece]] = []
    for destination in range(world_size):
        parts.append([])
        pieces.append([])
        for tensor, param in zip(tensors, params, strict=True):
            chunk = _chunk(tensor.numel(), world_size)
            part = tensor.reshape(-1)[destination * chunk : (destination + 1) * chunk]
            parts[-1].append(part)
            pieces[-1].append(Piece(getattr(param, NAME), destination * chunk, part.numel()))
    # 2
    work = torch.float32 if channel.error_feedback else dtype
    flat = torch.cat([part for row in parts for part in row]).to(work).div_(world_size)
    shards = list(torch.split(flat, [sum(part.numel() for part in row) for row in parts]))
    handle = channel.reduce_scatter(shards, codec, group, raw_nbytes=raw_nbytes, pieces=pieces)
    # 3
    return list(torch.split(handle.wait().to(dtype), [part.numel() for part in parts[rank]]))


def _chunk(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


COVERS = ("dp",)
PATCHES = (
    (REDUCE_SCATTER, make_reduce_scatter_coalesced),
    (AVG_SCATTER, make_avg_scatter_grads),
)
