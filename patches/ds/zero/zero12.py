"""Gradient reduction of ZeRO stages 1 and 2, dimension ``dp``.

Seam: ``DeepSpeedZeroOptimizer.allreduce_and_scatter``, which knows the owner of every slice of a
bucket. Upstream all-reduces the whole bucket there and discards the slices that a rank does not
own; this patch sends each slice to its owners only, which saves bytes in addition to the codec.
``average_tensor`` above it divides and chooses the stream; it is wrapped only to record where the
bucket starts in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import (
    NAME,
    OwnedRange,
    ReduceToOwners,
    channels_of,
)
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.codecs.base import Codec
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero import node_sums
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

MODULE = "deepspeed.runtime.zero.stage_1_and_2"
CLASS = "DeepSpeedZeroOptimizer"

AVERAGE_TENSOR = Seam(
    REQUIREMENT, MODULE, f"{CLASS}.average_tensor", ("self", "tensor", "communication_data_type")
)
ALLREDUCE_AND_SCATTER = Seam(
    REQUIREMENT,
    MODULE,
    f"{CLASS}.allreduce_and_scatter",
    (
        "self", "bucket", "communication_data_type", "numel_per_bucket", "log", "divide",
        "process_group",
    ),
)  # fmt: skip
#: storage offset of the bucket being averaged
_START: Scope[int | None] = Scope("bucket_start", None)
#: whether upstream reduces the current bucket, because it has no codec
DECLINED: Scope[bool] = Scope("bucket_declined", False)


class Slice(NamedTuple):
    """One slice of a bucket as upstream passes it: the part of one owner."""

    start: int  # offset in the bucket's memory
    numel: int
    ranks: tuple[int, ...]  # group ranks that own the slice
    values: Tensor  # 1-D view into the bucket, which becomes the reduced gradient
    # fp32 accumulator of a compact partition (0.19.8), to which the gradient is added
    output: Tensor | None


@around
def make_average_tensor(
    original: Any, self: Any, tensor: Tensor, communication_data_type: torch.dtype
) -> None:
    """Record where the bucket starts in memory, to find the parameter of a slice."""
    with _START.inside(int(tensor.storage_offset())):
        original(self, tensor, communication_data_type)


@around
def make_allreduce_and_scatter(
    original: Any,
    self: Any,
    bucket: Sequence[Any],
    communication_data_type: torch.dtype,
    numel_per_bucket: int = 500000000,
    log: Any = None,
    divide: bool = True,
    process_group: Any = None,
) -> None:
    """Reduce every slice to its owners.

    1 view the slices of a bucket as one flat tensor
    2 reduce each range to its owners
    3 the owner copies the sum into its slice and adds it to its accumulator
    """

    def native() -> None:
        with DECLINED.inside(True):
            original(
                self, bucket, communication_data_type, numel_per_bucket, log, divide,
                process_group,
            )  # fmt: skip

    channels = channels_of(self)
    if channels is None:
        native()
        return
    # 1
    slices = sorted(map(_slice, bucket), key=itemgetter(0))
    ranges = _ranges(tuple([(part.ranks, part.numel) for part in slices]))
    message = _OwnedBucket(
        numel=ranges[-1].stop,
        dtype=torch.float32 if self.sequence_parallel_size > 1 else communication_data_type,
        group=self.dp_process_group if process_group is None else process_group,
        ranges=ranges,
        optimizer=self,
        bucket_dtype=communication_data_type,
        slices=slices,
        divides=divide and self.gradient_average,
        crosses=node_sums.crosses(self) if self.partition_gradients else None,
    )
    channels["dp"].run(message, native=native, encoded=message.deliver)


@dataclass(eq=False, kw_only=True)
class _OwnedBucket(ReduceToOwners):
    """Reduce a bucket's slices to their owners; steps as in ``make_allreduce_and_scatter``."""

    optimizer: Any
    bucket_dtype: torch.dtype
    slices: Sequence[Slice]
    divides: bool
    in_native_dtype: bool = False  # for the sums of a lossless codec

    def load(self, codec: Codec) -> Tensor:
        """Join the slices and divide them, as upstream does before the sum."""
        flat = _flatten(self.slices)
        _keep_alive(self.optimizer, flat)
        if codec.lossless:
            self.in_native_dtype = True
            flat = flat.to(self.dtype)  # the dtype that native sends, so that sums are the same
        if self.divides:
            ranks = dist.get_world_size(self.group)
            flat = flat / (ranks / float(self.optimizer.sequence_parallel_size))
        return flat

    def pieces(self) -> tuple[Piece, ...]:
        """Return the whole parameters to which the slices belong, in order."""
        start, optimizer = _START.get(), self.optimizer
        assert start is not None, "a bucket outside average_tensor"
        params = [
            optimizer.bit16_groups[group][index]
            for group, index, _ in optimizer.ipg_buckets[self.bucket_dtype].params
        ]
        whole = [Piece(getattr(param, NAME), 0, param.numel()) for param in params]
        edges = [(part.start - start, part.start - start + part.numel) for part in self.slices]
        return _cut_pieces(tuple(whole), tuple(edges))

    def deliver(self, sums: Sequence[Tensor]) -> None:
        """Write the sums into the slices that this rank owns, and add them to accumulators."""
        # 3
        rank = dist.get_rank(self.group)
        owned = [part for part in self.slices if rank in part.ranks]
        for part, total in zip(owned, sums, strict=True):
            reduced = total.to(self.dtype) if self.in_native_dtype else total
            if part.output is not None:
                part.output.add_(reduced.to(part.output.dtype))
            part.values.copy_(reduced)
            _keep_alive(self.optimizer, part.values)


@functools.lru_cache(maxsize=4096)
def _ranges(slices: tuple[tuple[tuple[int, ...], int], ...]) -> tuple[OwnedRange, ...]:
    """Return the ranges of slices, given as (owners, elements), in their flat tensor.

    Equal buckets get the same tuple object in every step, which is the key of their plan.
    """
    ranges, position = [], 0
    for ranks, numel in slices:
        ranges.append(OwnedRange(position, position + numel, ranks))
        position += numel
    return tuple(ranges)


def _slice(element: Sequence[Any]) -> Slice:
    """Convert upstream's (ranks, slice), or (ranks, slice, output) since 0.19.8, to a Slice."""
    ranks, values = element[0], element[1]
    if values.dim() != 1:
        values = values.view(-1)
    owners = tuple(sorted(ranks)) if isinstance(ranks, frozenset) else (int(ranks),)
    output = element[2] if len(element) > 2 else None
    return Slice(values.storage_offset(), values.numel(), owners, values, output)


def _flatten(slices: Sequence[Slice]) -> Tensor:
    """Join the slices into one tensor: a view if they are adjacent in memory, else a copy."""
    first, size = slices[0], slices[0].values.itemsize
    position, base = first.start, first.values.data_ptr() - size * first.start
    for part in slices:  # two storages cannot start at the same address
        if part.start != position or part.values.data_ptr() != base + size * position:
            return torch.cat([part.values for part in slices])
        position += part.numel
    return first.values.as_strided((position - first.start,), (1,), first.start)


@functools.lru_cache(maxsize=4096)
def _cut_pieces(whole: tuple[Piece, ...], edges: tuple[tuple[int, int], ...]) -> tuple[Piece, ...]:
    """Return the parts of the bucket's parameters ``whole`` inside the ranges ``edges``; cached."""
    return tuple(piece for low, high in edges for piece in cut(whole, low, high))


def _keep_alive(optimizer: Any, tensor: Tensor) -> None:
    """Mark ``tensor`` as used by the reduction stream, so that its memory is not reused too
    early.
    """
    if optimizer.overlap_comm and tensor.is_cuda:
        tensor.record_stream(optimizer.reduction_stream)


COVERS = ("dp",)
PATCHES = (
    (AVERAGE_TENSOR, make_average_tensor),
    (ALLREDUCE_AND_SCATTER, make_allreduce_and_scatter),
)
