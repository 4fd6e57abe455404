"""Gradient all-reduce of ZeRO stage 0 and of BF16_Optimizer, dimension ``dp``.

Seam: ``DeepSpeedEngine.allreduce_bucket``, which gets a bucket of one dtype, group and divisor.
``allreduce_gradients`` and ``buffered_allreduce_fallback`` above it also handle sparse gradients
(``sparse_rows``); ``dist.all_reduce`` below it also carries norms and overflow flags.

Divisors are upstream's: ``dp_world_size`` may be a float (sequence parallel) and differ from the
size of the group (experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, AllReduce, channels_of
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.errors import SeamError
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

ALLREDUCE_BUCKET = Seam(
    requirement=REQUIREMENT,
    module="deepspeed.runtime.engine",
    qualname="DeepSpeedEngine.allreduce_bucket",
    parameters=("self", "bucket", "dp_group", "dp_world_size"),
)


@around
def make_allreduce_bucket(
    original: Callable[..., Tensor],
    self: Any,
    bucket: Sequence[Tensor],
    dp_group: Any,
    dp_world_size: float | None = None,
) -> Tensor:
    """All-reduce the flattened bucket encoded; call upstream if there is no codec."""
    channels = channels_of(self)
    if channels is None:
        return original(self, bucket, dp_group, dp_world_size)
    channel = channels["dp"]
    message = _AveragedBucket(
        numel=sum(grad.numel() for grad in bucket),
        dtype=self.communication_data_type,
        group=dp_group,
        engine=self,
        bucket=bucket,
        dp_world_size=dp_world_size,
        in_fp32=channel.error_feedback,
    )
    return channel.run(
        message,
        native=lambda: original(self, bucket, dp_group, dp_world_size),
        encoded=message.finish,
    )


@dataclass(eq=False, kw_only=True)
class _AveragedBucket(AllReduce):
    """Average of a bucket of gradients.

    With error feedback all scaling is done first, in fp32, so that residuals have the averaged
    gradient's units and stay valid if the number of ranks changes.

    Attributes:
        flat: the gradients as one tensor, in the form that upstream returns; ``work`` is the tensor
            that is summed.
        after: factor to apply to the sum.
    """

    engine: Any
    bucket: Sequence[Tensor]
    dp_world_size: float | None
    in_fp32: bool
    flat: Tensor = field(init=False)
    work: Tensor = field(init=False)
    after: float = 1.0

    def load(self, codec: Codec) -> Tensor:
        """Flatten and scale the gradients."""
        size = dist.get_world_size(self.group) if self.dp_world_size is None else self.dp_world_size
        before, self.after = factors(self.engine, size)
        self.flat = self.work = self.engine.flatten(self.bucket)
        if self.in_fp32:
            before, self.after = before * self.after, 1.0
            self.work = self.flat.to(torch.float32)
        elif codec.lossless:
            # the dtype that native sends, so that sums are the same
            self.work = self.flat.to(self.dtype)
        if before != 1.0:
            self.work.mul_(before)
        return self.work

    def pieces(self) -> list[Piece]:
        """Return the parameters of the bucket."""
        return pieces_of(self.engine, self.bucket)

    def finish(self, handle: Handle) -> Tensor:
        """Complete the sum and return the averaged gradients."""
        handle.wait()
        if self.after != 1.0:
            self.work.mul_(self.after)
        if self.work is not self.flat:
            self.flat.copy_(self.work)
        return self.flat


def factors(engine: Any, dp_world_size: float) -> tuple[float, float]:
    """Return upstream's factors before and after the sum."""
    if not engine.gradient_average:
        return 1.0, 1.0
    if not engine.postscale_gradients():
        return 1.0 / dp_world_size, 1.0
    predivide = engine.gradient_predivide_factor()
    return 1.0 / predivide, predivide / dp_world_size


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
        for grad in bucket:  # views of the flat buffer if part of it is frozen
            start = (grad.data_ptr() - flat.data_ptr()) // flat.itemsize
            if 0 <= start < flat.numel() and grad.numel() < flat.numel():
                found[grad.data_ptr()] = cut(pieces, start, start + grad.numel())
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
