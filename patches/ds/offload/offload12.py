"""Gradient and parameter copies of ZeRO-Offload, stages 1 and 2, dimension ``offload``.

Seams:

* ``copy_grads_in_partition``, called for each reduced gradient of this rank. The copies themselves
  are in several places below it, one of them inline; above it gradients are not reduced yet.
  Upstream casts them to fp32 on the device and copies that; here they are encoded in their dtype
  and the host widens them. Norms and the overflow flag are first computed on the device, as in
  upstream, or on the host if it adds up micro-batches (``offload_sums``).
* ``step``: decoded gradients must be complete before it, and the copy of updated parameters is one
  line inside it. A ``TorchFunctionMode`` intercepts every ``copy_`` and recognizes this one by its
  source, one of the optimizer's 16-bit host buffers.
* ``update_lp_params``: the same copy, after loading and around saving.
* ``finalize_gradient_accumulation_boundary`` (0.19.8): closes sums if the script sets the boundary.
* ``get_lp_grad_fragment``: code that reads a gradient before the step waits for its decoder.

The fp32 master weights stay on the host and exact. Every rank gathers the parameters that the
owner's device decoded, so replicas are equal; saved weights are exact (``exact_weights``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels, HostMoves, channels_of
from hybridcomp.codecs.base import Codec
from hybridcomp.patches.ds.offload.offload_accumulation import add_on_host, adds_on_device, sums_of
from hybridcomp.patches.ds.offload.offload_sums import (
    Uploads,
    count_last_copy,
    has,
    make_finalize,
    make_step,
    norm_dtype,
    offloads,
    upload,
)
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero.node_sums import at_boundary
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

MODULE = "deepspeed.runtime.zero.stage_1_and_2"
CLASS = "DeepSpeedZeroOptimizer"
FRAGMENTS = "deepspeed.utils.tensor_fragment"


def _seam(method: str, *parameters: tuple[str, ...]) -> Seam:
    return Seam(REQUIREMENT, MODULE, f"{CLASS}.{method}", parameters)


@around
def make_copy_grads_in_partition(
    original: Any, self: Any, param: Any, *args: Any, **kwargs: Any
) -> None:
    """Encode one gradient, or the part of it that this rank owns."""
    channels = channels_of(self)
    if channels is None or not offloads(self) or not _copy(self, channels, param):
        original(self, param, *args, **kwargs)


def _copy(optimizer: Any, channels: Channels, param: Any) -> bool:
    """Copy the gradient of ``param`` to the host; return False if it is left to upstream."""
    key = optimizer.get_param_id(param)
    group, source, start, numel = optimizer.grad_position[key]
    boundary, compact = at_boundary(optimizer), _compact(optimizer, group)
    if compact and not boundary:
        return False  # it is summed on the device
    if compact:
        partition = dist.get_rank(group=optimizer.real_dp_process_group[group])
        values = optimizer._get_compact_grad_partition_slice(group, partition, key, numel)
    else:
        values = optimizer.get_param_gradient_attribute(param).view(-1).narrow(0, source, numel)
    values = values.detach()
    first = optimizer.micro_step_id <= 0
    alone = compact or (first and boundary)
    out = optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, numel)
    raw_nbytes = _native_nbytes(optimizer, param, out, boundary, alone)
    codec = channels.host.copy_codec(numel, values.dtype, "backward")
    if not alone and adds_on_device(optimizer, channels, values, _owned(optimizer), values.device):
        sums = sums_of(optimizer)
        if not boundary:
            total = sums.add(key, values, values.dtype, first=first)
            sums.open[key] = partial(_close, optimizer, channels, key, total, out, codec)
            channels.host.kept(raw_nbytes)
            return True
        if key in sums.totals and not first:
            values.add_(sums.totals[key])  # as in upstream's addition
        sums.open.pop(key, None)
        if codec is None:
            _leave(optimizer, channels, param, out, raw_nbytes)
            return True
        alone = True
    if codec is None:
        channels["offload"].count_native(raw_nbytes, "backward")
        return False
    if alone:
        if compact:
            optimizer._offload_accumulated_param_ids.add(key)
            _look(optimizer, key, values)
        else:
            optimizer.set_norm_for_param_grad_in_gpu(param)
            optimizer.update_offload_overflow_tracker_for_param_grad(param)
        channels.host.to_host(values, out, codec, raw_nbytes=raw_nbytes)
    else:
        add_on_host(
            optimizer, channels, key, values,
            partial(torch.zeros, numel, dtype=values.dtype), out, codec,
            partial(_norm, norm_dtype(optimizer)),
            raw_nbytes=raw_nbytes, first=first, boundary=boundary,
        )  # fmt: skip
    if boundary:
        optimizer.clear_grad_attribute(param)
    return True


def _owned(optimizer: Any) -> int:
    """Return the elements of all gradients that this rank's optimizer steps on."""
    return sum(partition.numel() for partition in optimizer.single_partition_of_fp32_groups)


def _leave(optimizer: Any, channels: Channels, param: Any, out: Tensor, raw_nbytes: int) -> None:
    """Copy a complete sum as upstream does, but without the partial sums that it would fetch."""
    count_last_copy(channels, out, raw_nbytes)
    optimizer.set_norm_for_param_grad_in_gpu(param)
    optimizer.update_offload_overflow_tracker_for_param_grad(param)
    optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)


def _look(optimizer: Any, key: int, values: Tensor) -> None:
    """Compute norm and overflow flag on the device, as upstream does."""
    optimizer.norm_for_param_grads[key] = _norm(norm_dtype(optimizer), values)
    optimizer.update_offload_overflow_tracker(values)


def _close(
    optimizer: Any, channels: Channels, key: int, total: Tensor, out: Tensor, codec: Codec | None
) -> None:
    """Copy a sum from the device to the host, once the script has closed it."""
    _look(optimizer, key, total)
    raw_nbytes = total.numel() * total.itemsize + out.numel() * out.itemsize
    if codec is None:
        channels["offload"].count_native(raw_nbytes, "backward")
        out.copy_(total)
    else:
        channels.host.to_host(total, out, codec, raw_nbytes=raw_nbytes)


def _norm(dtype: torch.dtype, values: Tensor) -> Tensor:
    norm: Tensor = values.to(dtype).norm(2)
    return norm


def _compact(optimizer: Any, group: int) -> bool:
    """Return whether upstream (0.19.8) sums the group's gradients in fp32 on the device."""
    asks = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return asks is not None and bool(asks(group))


def _native_nbytes(optimizer: Any, param: Any, out: Tensor, boundary: bool, alone: bool) -> int:
    """Return the bytes that upstream copies: the old sum to the device, the new sum to the host,
    and in the last micro-batch the gradient in the optimizer's dtype.

    Upstream copies sums of whole parameters, even if this rank owns only part of them.
    """
    last = out.numel() * out.itemsize if boundary else 0
    if alone:
        return last
    whole = not optimizer.low_precision_master_weights_and_grads
    total = (param.numel() if whole else out.numel()) * param.itemsize
    return int(last + total * (2 if optimizer.micro_step_id > 0 else 1))


@around
@torch.no_grad()
def make_update_lp_params(original: Any, self: Any) -> None:
    """Copy parameters to the device encoded, as the step does, then call upstream's gather."""
    channels = channels_of(self)
    if channels is None or not offloads(self):
        original(self)
        return
    from deepspeed.runtime.zero import stage_1_and_2

    partitions = self.parallel_partitioned_bit16_groups
    masters = self.single_partition_of_fp32_groups
    for group, (shares, master) in enumerate(zip(partitions, masters, strict=True)):
        own = shares[dist.get_rank(group=self.real_dp_process_group[group])].data
        if not upload(channels, master.data, own):
            own.copy_(master.data)
    stage_1_and_2.all_gather_dp_groups(
        groups_flat=self.bit16_groups_flat,
        partitioned_param_groups=partitions,
        dp_process_group=self.real_dp_process_group,
        start_alignment_factor=self.nccl_start_alignment_factor,
        allgather_bucket_size=self.allgather_bucket_size,
    )


@around
def make_get_lp_grad_fragment(original: Any, self: Any, index_in_param_group: int) -> Any:
    """Wait for the gradients of all engines, since a fragment does not know its engine."""
    HostMoves.finish_all()
    return original(self, index_in_param_group)


def _patches() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    finalize = "finalize_gradient_accumulation_boundary"
    return (
        (
            _seam("copy_grads_in_partition", ("self", "param"), ("self", "param", "group_idx")),
            make_copy_grads_in_partition,
        ),
        (_seam("step", ("self", "closure")), partial(make_step, uploads=Uploads)),
        (_seam("update_lp_params", ("self",)), make_update_lp_params),
        *(((_seam(finalize, ("self",)), make_finalize),) if has(MODULE, CLASS, finalize) else ()),
        (
            Seam(
                REQUIREMENT,
                FRAGMENTS,
                "tensor_fragment.get_lp_grad_fragment",
                ("self", "index_in_param_group"),
            ),
            make_get_lp_grad_fragment,
        ),
    )


COVERS = ("offload",)
PATCHES = _patches()
