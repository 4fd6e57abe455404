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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, Channel, ReduceScatter, channels_of, native_nbytes
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import ReduceScatterHandle
from hybridcomp.patches.common.scope import Scope
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
_REDUCING: Scope[tuple[Channel, Sequence[Any]] | None] = Scope("stage3", None)


def make_avg_scatter_grads(original: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Publish the channel and the parameters whose gradients are reduced next."""

    @functools.wraps(original)
    def __avg_scatter_grads(
        self: Any, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        channels = channels_of(self)
        with _REDUCING.inside(None if channels is None else (channels["dp"], params_to_reduce)):
            return original(self, params_to_reduce, communication_data_type)

    return __avg_scatter_grads


def make_reduce_scatter_coalesced(
    original: Callable[..., list[Tensor]],
) -> Callable[..., list[Tensor]]:
    """Reduce-scatter gradients encoded; call upstream where there is no codec."""

    @functools.wraps(original)
    def reduce_scatter_coalesced(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
        reducing = _REDUCING.get()
        if reducing is None:
            return original(tensors, group)
        channel, params = reducing
        message = _Gradients(
            numel=sum(tensor.numel() for tensor in tensors),
            dtype=tensors[0].dtype,
            group=group,
            tensors=tensors,
            params=params,
            in_fp32=channel.error_feedback,
        )
        return channel.run(message, native=lambda: original(tensors, group), encoded=message.finish)

    return reduce_scatter_coalesced


@dataclass(eq=False, kw_only=True)
class _Gradients(ReduceScatter):
    """Average of this rank's part of every gradient, in the gradients' dtype.

    1 lay out the parts by destination: rank r gets ``[r * chunk, (r + 1) * chunk)`` of each
    2 average: divide before the sum, as upstream does
    3 cut the sum of this rank's parts into one tensor per parameter
    """

    tensors: Sequence[Tensor]
    params: Sequence[Any]
    in_fp32: bool

    def native_nbytes(self, size: int) -> int:
        """Return the bytes that upstream sends, padding included."""
        padded = sum(_chunk(tensor.numel(), size) * size for tensor in self.tensors)
        return native_nbytes.reduce_scatter_nbytes(padded, self.dtype, size)

    def _part(self, tensor: Tensor, destination: int) -> Tensor:
        chunk = _chunk(tensor.numel(), dist.get_world_size(self.group))
        return tensor.reshape(-1)[destination * chunk : (destination + 1) * chunk]

    @torch.no_grad()
    def load(self, codec: Codec) -> Sequence[Tensor]:
        """Lay out and divide the gradients."""
        size = dist.get_world_size(self.group)
        # 1
        rows = [[self._part(tensor, to) for tensor in self.tensors] for to in range(size)]
        # 2
        work = torch.float32 if self.in_fp32 else self.dtype
        flat = torch.cat([part for row in rows for part in row]).to(work).div_(size)
        return torch.split(flat, [sum(part.numel() for part in row) for row in rows])

    def pieces(self) -> list[list[Piece]]:
        """Return the parts of parameters in each destination's shard."""
        size = dist.get_world_size(self.group)
        return [[self._piece(t, p, to, size) for t, p in self._both()] for to in range(size)]

    def _both(self) -> Iterator[tuple[Tensor, Any]]:
        return zip(self.tensors, self.params, strict=True)

    def _piece(self, tensor: Tensor, param: Any, destination: int, size: int) -> Piece:
        start = destination * _chunk(tensor.numel(), size)
        return Piece(getattr(param, NAME), start, self._part(tensor, destination).numel())

    @torch.no_grad()
    def finish(self, handle: ReduceScatterHandle) -> list[Tensor]:
        """Complete the sum and return this rank's part of each gradient."""
        # 3
        rank = dist.get_rank(self.group)
        numels = [self._part(tensor, rank).numel() for tensor in self.tensors]
        return list(torch.split(handle.wait().to(self.dtype), numels))


def _chunk(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


COVERS = ("dp",)
PATCHES = (
    (REDUCE_SCATTER, make_reduce_scatter_coalesced),
    (AVG_SCATTER, make_avg_scatter_grads),
)
