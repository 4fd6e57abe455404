"""Gradient and parameter copies of ZeRO-Offload, stage 3, dimension ``offload``.

Seams:

* ``partition_grads`` gets the owner's part of each reduced gradient. Upstream copies it to the
  host, back to the device, and in fp32 to the host once more; with several micro-batches it fetches
  the sum for each. Here the sum is copied once, encoded, and the host widens it; or each gradient
  is copied and the host adds them up (``offload_sums``). Gradients without a codec are passed to
  the original in one call.
* ``_reassign_or_swap_out_partitioned_parameters`` copies one sub-group of updated parameters to the
  device. ``step``, which calls it, first waits for the gradients.
* ``finalize_gradient_accumulation_boundary`` (0.19.8): closes sums if the script sets the boundary.
* ``_get_fp32_grad_state_partition``: code that reads a gradient before the step waits for it.

With ``ratio`` below 1 the first sub-groups step on the device: they are left to upstream.

Not covered: NVMe, SuperOffload, and parameters that stay on the host (``offload_param``), which the
check of the config refuses or announces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channels, channels_of
from hybridcomp.codecs.base import Codec
from hybridcomp.patches.ds.offload.offload_accumulation import add_on_host, adds_on_device, sums_of
from hybridcomp.patches.ds.offload.offload_sums import (
    count_last_copy,
    has,
    make_finalize,
    make_step,
    offloads,
    upload,
)
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero.node_sums import at_boundary
from hybridcomp.patches.ds.zero.partitions import filled
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

MODULE = "deepspeed.runtime.zero.stage3"
CLASS = "DeepSpeedZeroOptimizer_Stage3"


def _seam(method: str, *parameters: str) -> Seam:
    return Seam(REQUIREMENT, MODULE, f"{CLASS}.{method}", parameters)


@around
def make_partition_grads(
    original: Any, self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]
) -> Any:
    """Encode gradients that have a codec; leave the others to upstream."""
    channels = channels_of(self)
    if channels is None or not offloads(self):
        return original(self, params_to_release, grad_partitions)
    rest = [
        (param, part)
        for param, part in zip(params_to_release, grad_partitions, strict=True)
        if not _copy(self, channels, param, part)
    ]
    return original(self, [param for param, _ in rest], [part for _, part in rest])


def _copy(optimizer: Any, channels: Channels, param: Any, part: Tensor) -> bool:
    """Copy this rank's part of ``param``'s gradient to the host; False if left to upstream."""
    if not filled(param):
        return False  # it is only padding
    key = optimizer.get_param_id(param)
    group, start, _ = optimizer.grad_position[key]
    buffers = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    total = buffers[param.ds_id].narrow(0, 0, part.numel())
    out = optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, start, part.numel())
    boundary, first = at_boundary(optimizer), optimizer.micro_step_id == 0
    last = out.numel() * out.itemsize if boundary else 0
    raw_nbytes = 2 * total.numel() * total.itemsize + last
    # upstream sums in the buffer's dtype, and widens the gradient if that is wider
    narrow = total.itemsize >= part.itemsize
    values = part.detach().view(-1) if narrow else part.detach().view(-1).to(total.dtype)
    if steps_on_device(optimizer, group):
        channels["offload"].count_native(raw_nbytes - last, "backward")
        return False
    codec = channels.host.copy_codec(values.numel(), values.dtype, "backward")
    owned = optimizer.grad_partitions_flat_buffer.numel()
    if not (first and boundary) and adds_on_device(
        optimizer, channels, total, owned, values.device
    ):
        _add(optimizer, channels, param, values, total, out, raw_nbytes)
    elif codec is None:
        channels["offload"].count_native(raw_nbytes, "backward")
        return False
    elif first and boundary:
        optimizer.norm_for_param_grads[key] = optimizer._constant_buffered_norm2(values)
        _send(channels, values, total, out, codec, raw_nbytes)
    else:
        norm = optimizer._constant_buffered_norm2
        add_on_host(
            optimizer, channels, key, values, lambda: total, out, codec, norm,
            raw_nbytes=raw_nbytes, first=first, boundary=boundary,
        )  # fmt: skip
    if param.grad is not None and param.grad.is_cuda:
        param.grad.record_stream(torch.cuda.current_stream(param.grad.device))
    param.grad = None
    return True


def _add(
    optimizer: Any,
    channels: Channels,
    param: Any,
    values: Tensor,
    held: Tensor,
    out: Tensor,
    raw_nbytes: int,
) -> None:
    """Add a micro-batch to the sum on the device; at the boundary copy the sum to the host.

    ``held``: upstream's buffer for the sum on the host, of the same dtype.
    """
    key, sums = optimizer.get_param_id(param), sums_of(optimizer)
    first, boundary = optimizer.micro_step_id == 0, at_boundary(optimizer)
    total = sums.add(key, values, held.dtype, first=first)
    if not boundary:
        channels.host.kept(raw_nbytes)
        last = out.numel() * out.itemsize
        sums.open[key] = partial(_close, optimizer, channels, key, total, held, out, last)
        return
    sums.open.pop(key, None)
    _close(optimizer, channels, key, total, held, out, raw_nbytes)


def _close(
    optimizer: Any,
    channels: Channels,
    key: int,
    total: Tensor,
    held: Tensor,
    out: Tensor,
    raw_nbytes: int,
) -> None:
    """Compute the norm of a sum on the device, as upstream does, and copy the sum to the host."""
    optimizer.norm_for_param_grads[key] = optimizer._constant_buffered_norm2(total)
    codec = channels.host.copy_codec(total.numel(), total.dtype, "backward")
    if codec is not None:
        _send(channels, total, held, out, codec, raw_nbytes)
        return
    count_last_copy(channels, out, raw_nbytes)
    if total.dtype == torch.float16:
        held.copy_(total)
    out.copy_(total.to(out.dtype), non_blocking=True)


def _send(
    channels: Channels, values: Tensor, held: Tensor, out: Tensor, codec: Codec, raw_nbytes: int
) -> None:
    """Copy to the optimizer's gradient; in fp16 first to the buffer checked for overflow."""
    if values.dtype != torch.float16:
        channels.host.to_host(values, out, codec, raw_nbytes=raw_nbytes)
        return
    widen = partial(_widen, out, held)
    channels.host.to_host(values, held, codec, raw_nbytes=raw_nbytes, then=widen)


def _widen(out: Tensor, held: Tensor) -> None:
    out.copy_(held)


@around
def make_reassign(original: Any, self: Any, sub_group_id: int) -> None:
    """Copy the updated parameters of one sub-group to the device, encoded."""
    channels, flat = channels_of(self), self.fp16_partitioned_groups_flat[sub_group_id]
    ours = channels is not None and offloads(self) and not self.offload_param
    if not ours or flat is None or steps_on_device(self, sub_group_id):
        original(self, sub_group_id)
        return
    assert channels is not None
    master = self.fp32_partitioned_groups_flat[sub_group_id].data
    if channels["offload"].active:
        _zero_padding(self.fp16_groups[sub_group_id], master)
    if upload(channels, master, flat.data):
        self._unflatten_partitioned_parameters(sub_group_id)
    else:
        original(self, sub_group_id)


def steps_on_device(optimizer: Any, sub_group_id: int) -> bool:
    """Return whether the device steps a sub-group, as ``ratio`` below 1 has it for the first."""
    place: str = optimizer.subgroup_to_device[sub_group_id]
    return place != "cpu"


def _zero_padding(params: list[Any], master: Tensor) -> None:
    """Zero the padding after the end of each parameter, which upstream leaves uninitialized.

    It shares codec blocks with parameters and may be NaN.
    """
    start = 0
    for param in params:
        stop = start + param.partition_numel()
        master[start + filled(param) : stop].zero_()
        start = stop


@around
def make_get_fp32_grad(original: Any, self: Any, param: Any, release_swap_buffers: bool) -> Any:
    """Wait for gradients that are being decoded."""
    channels = channels_of(self)
    if channels is not None:
        channels.host.finish()
    return original(self, param, release_swap_buffers)


def _patches() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    finalize = "finalize_gradient_accumulation_boundary"
    later = ((_seam(finalize, "self"), make_finalize),) if has(MODULE, CLASS, finalize) else ()
    return (
        (
            _seam("partition_grads", "self", "params_to_release", "grad_partitions"),
            make_partition_grads,
        ),
        (_seam("step", "self", "closure"), make_step),
        (
            _seam("_reassign_or_swap_out_partitioned_parameters", "self", "sub_group_id"),
            make_reassign,
        ),
        *later,
        (
            _seam("_get_fp32_grad_state_partition", "self", "param", "release_swap_buffers"),
            make_get_fp32_grad,
        ),
    )


COVERS = ("offload",)
PATCHES = _patches()
