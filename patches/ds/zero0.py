"""Gradient all-reduce of ZeRO stage 0 and of BF16_Optimizer, dimension ``dp``.

Seam: ``DeepSpeedEngine.allreduce_bucket``, which gets a bucket of one dtype, group and divisor.
``allreduce_gradients`` and ``buffered_allreduce_fallback`` above it also handle sparse gradients,
which stay native; ``dist.all_reduce`` below it also carries norms and overflow flags.

Divisors are upstream's: ``dp_world_size`` may be a float (sequence parallel) and differ from the
size of the group (experts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, Channel, channels_of, native_nbytes
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.errors import SeamError
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patching import Seam

ALLREDUCE_BUCKET = Seam(
    requirement=REQUIREMENT,
    module="deepspeed.runtime.engine",
    qualname="DeepSpeedEngine.allreduce_bucket",
    parameters=("self", "bucket", "dp_group", "dp_world_size"),
)


def make_allreduce_bucket(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """All-reduce the flattened bucket encoded; call upstream where there is no codec."""

    @functools.wraps(original)
    def allreduce_bucket(
        self: Any, bucket: Sequence[Tensor], dp_group: Any, dp_world_size: float | None = None
    ) -> Tensor:
        channels = channels_of(self)
        if channels is None:
            return original(self, bucket, dp_group, dp_world_size)
        channel = channels["dp"]
        numel, dtype = sum(grad.numel() for grad in bucket), self.communication_data_type
        world_size = dist.get_world_size(dp_group)
        raw_nbytes = native_nbytes.all_reduce_nbytes(numel, dtype, world_size)
        codec = channel.codec(numel, dtype, dp_group)
        if codec is None:
            channel.native(raw_nbytes)
            return original(self, bucket, dp_group, dp_world_size)
        before, after = factors(self, world_size if dp_world_size is None else dp_world_size)
        pieces = pieces_of(self, bucket) if channel.wants_pieces(codec) else None
        flat: Tensor = self.flatten(bucket)
        reduce(channel, flat, codec, dp_group, dtype, (before, after), raw_nbytes, pieces)
        return flat

    return allreduce_bucket


def factors(engine: Any, dp_world_size: float) -> tuple[float, float]:
    """Return upstream's factors before and after the sum."""
    if not engine.gradient_average:
        return 1.0, 1.0
    if not engine.postscale_gradients():
        return 1.0 / dp_world_size, 1.0
    predivide = engine.gradient_predivide_factor()
    return 1.0 / predivide, predivide / dp_world_size


def reduce(
    channel: Channel,
    flat: Tensor,
    codec: Codec,
    group: Any,
    dtype: torch.dtype,
    scaling: tuple[float, float],
    raw_nbytes: int,
    pieces: Sequence[Piece] | None,
) -> None:
    """Average ``flat`` over ``group`` in place.

    With error feedback all scaling comes first and in fp32: residuals are then in units of the
    averaged gradient, and stay valid when the number of ranks changes.
    """
    before, after = scaling
    work = flat
    if channel.error_feedback:
        before, after, work = before * after, 1.0, flat.to(torch.float32)
    elif codec.lossless:
        work = flat.to(dtype)  # the dtype that native sends, for the same sums
    if before != 1.0:
        work.mul_(before)
    channel.all_reduce(work, codec, group, raw_nbytes=raw_nbytes, pieces=pieces).wait()
    if after != 1.0:
        work.mul_(after)
    if work is not flat:
        flat.copy_(work)


def pieces_of(engine: Any, bucket: Sequence[Tensor]) -> list[Piece]:
    """Return the parameters of a bucket's gradients as pieces, matched by memory address.

    A gradient of stage 0 is one parameter's. BF16_Optimizer reduces one flat buffer for each group
    of parameters, padded at its end.
    """
    found: dict[int, list[Piece]] = {}
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            found[parameter.grad.data_ptr()] = [_whole(parameter)]
    groups = getattr(engine.optimizer, "bf16_groups", ())
    buffers = getattr(engine.optimizer, "fp32_groups_gradients_flat", ())
    for group, flat in zip(groups, buffers, strict=True):
        pieces = [_whole(parameter) for parameter in group]
        padding = flat.numel() - sum(piece.numel for piece in pieces)
        found[flat.data_ptr()] = [*pieces, Piece("", 0, padding)] if padding else pieces
    missing = [tuple(grad.shape) for grad in bucket if grad.data_ptr() not in found]
    if missing:
        raise SeamError(
            f"{ALLREDUCE_BUCKET}: gradients of shapes {missing} belong to no parameter of the "
            "engine; use a codec without error_bound and error_feedback under compression.dp"
        )
    return [piece for grad in bucket for piece in found[grad.data_ptr()]]


def _whole(parameter: Any) -> Piece:
    return Piece(getattr(parameter, NAME), 0, parameter.numel())


COVERS = ("dp",)
PATCHES = ((ALLREDUCE_BUCKET, make_allreduce_bucket),)
