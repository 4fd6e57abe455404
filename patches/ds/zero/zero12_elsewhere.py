"""Count gradients of ZeRO stages 1 and 2 that are reduced on a path without a seam.

That is the case under ``reduce_scatter: false``, ``use_multi_rank_bucket_allreduce: false`` or
``contiguous_gradients: false``, which the check of the config has refused or announced; such
gradients stay native. On any other path the two functions here raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import AllReduce, channels_of
from hybridcomp.errors import ConfigError
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero.zero12 import CLASS, DECLINED, MODULE
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

ALLREDUCE_BUCKET = Seam(
    REQUIREMENT,
    MODULE,
    f"{CLASS}.allreduce_bucket",
    ("self", "bucket", "communication_data_type", "rank", "log", "divide", "process_group"),
)
PREDIVIDE = Seam(
    REQUIREMENT,
    MODULE,
    f"{CLASS}.gradient_reduction_w_predivide",
    ("self", "tensor", "communication_data_type"),
)


@around
def make_allreduce_bucket(
    original: Callable[..., Tensor],
    self: Any,
    bucket: Sequence[Tensor],
    communication_data_type: torch.dtype,
    rank: int | None = None,
    log: Any = None,
    divide: bool = True,
    process_group: Any = None,
) -> Tensor:
    """Count the native reduction of a bucket."""
    group = self.dp_process_group if process_group is None else process_group
    dtype = torch.float32 if self.sequence_parallel_size > 1 else communication_data_type
    numel = sum(tensor.numel() for tensor in bucket)
    _count(self, ALLREDUCE_BUCKET, numel, dtype, group, to_one=rank is not None)
    return original(self, bucket, communication_data_type, rank, log, divide, process_group)


@around
def make_gradient_reduction_w_predivide(
    original: Callable[..., Tensor], self: Any, tensor: Tensor, communication_data_type: torch.dtype
) -> Tensor:
    """Count the native reduction of a tensor."""
    numel, group = tensor.numel(), self.dp_process_group
    _count(self, PREDIVIDE, numel, communication_data_type, group, to_one=False)
    return original(self, tensor, communication_data_type)


def _count(
    optimizer: Any, seam: Seam, numel: int, dtype: torch.dtype, group: Any, to_one: bool
) -> None:
    """Count a native reduction; raise ConfigError if the block asks for a compressed one."""
    channels = channels_of(optimizer)
    if channels is None or DECLINED.get():  # the channel has already counted that bucket
        return
    channel, strict = channels["dp"], channels.config.on_unsupported == "error"
    if strict and channel.encodes(numel, dtype, group):
        raise ConfigError(
            "compression.dp",
            f"gradients in {seam.qualname}",
            "this configuration of ZeRO reduces gradients on a path without a seam; remove what "
            'leads there, or set "dp": "none", or set "on_unsupported": "native"',
        )
    message = _Elsewhere(numel=numel, dtype=dtype, group=group, to_one=to_one)
    channel.run_native(message, lambda: None)


@dataclass(eq=False, kw_only=True)
class _Elsewhere(AllReduce):
    """A reduction on a path without a seam, to all ranks or to one."""

    to_one: bool

    def native_nbytes(self, size: int) -> int:
        """Return the bytes: a reduction to one rank sends half of what an all-reduce sends."""
        nbytes = super().native_nbytes(size)
        return nbytes // 2 if self.to_one else nbytes


PATCHES = (
    (ALLREDUCE_BUCKET, make_allreduce_bucket),
    (PREDIVIDE, make_gradient_reduction_w_predivide),
)
