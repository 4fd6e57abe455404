"""Gradient and parameter copies of ZeRO-Offload, stage 3, dimension ``offload``.

Seams:

* ``partition_grads``: what it gets is the owner's part of each reduced gradient. Upstream copies it
  to the host, back to the device, and in fp32 to the host once more; with several micro-batches it
  fetches the sum for each. Here each crosses once, encoded, and the host adds, widens and copies
  (``ds_host``). Parameters without a codec are left to the original, in one call.
* ``_reassign_or_swap_out_partitioned_parameters``: one sub-group of updated parameters to the
  device. ``step`` around it waits for the gradients before.
* ``finalize_gradient_accumulation_boundary`` (0.19.8): closes sums where the script says when.
* ``_get_fp32_grad_state_partition``: whoever reads a gradient before the step waits for it.

Not through here: NVMe, ``ratio`` below 1, SuperOffload, and parameters that stay on the host
(``offload_param``), which the check of the config refuses or announces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels, channels_of
from hybridcomp.patches.ds_host import at_boundary, has, offloads, settle, sums_of
from hybridcomp.patches.ds_offload import upload
from hybridcomp.patching import Seam

REQUIREMENT = "deepspeed >= 0.19, < 0.20"
MODULE = "deepspeed.runtime.zero.stage3"
CLASS = "DeepSpeedZeroOptimizer_Stage3"


def _seam(method: str, *parameters: str) -> Seam:
    return Seam(REQUIREMENT, MODULE, f"{CLASS}.{method}", parameters)


def make_partition_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Encode what has a codec, leave the rest to upstream."""

    @functools.wraps(original)
    def partition_grads(
        self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]
    ) -> Any:
        channels = channels_of(self)
        if channels is None or not offloads(self):
            return original(self, params_to_release, grad_partitions)
        rest = [
            (param, part)
            for param, part in zip(params_to_release, grad_partitions, strict=True)
            if not _copy(self, channels, param, part)
        ]
        return original(self, [param for param, _ in rest], [part for _, part in rest])

    return partition_grads


def _copy(optimizer: Any, channels: Channels, param: Any, part: Tensor) -> bool:
    """Move this rank's part of the gradient of ``param``; False: left to upstream."""
    if param.partition_numel() * dist.get_rank(param.ds_process_group) >= param.ds_numel:
        return False  # only padding
    key = optimizer.get_param_id(param)
    group, start, _ = optimizer.grad_position[key]
    buffers = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    total = buffers[param.ds_id].narrow(0, 0, part.numel())
    out = optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, start, part.numel())
    boundary, first = at_boundary(optimizer), optimizer.micro_step_id == 0
    last = out.numel() * out.itemsize if boundary else 0
    raw_nbytes = 2 * total.numel() * total.itemsize + last
    # summed in the dtype of the buffer; where that is wider, the host widens
    narrow = total.itemsize >= part.itemsize
    values = part.detach().view(-1) if narrow else part.detach().view(-1).to(total.dtype)
    codec = channels["offload"].copy_codec(values.numel(), values.dtype, "backward")
    if codec is None:
        channels["offload"].native(raw_nbytes, "backward")
        return False
    sums = sums_of(optimizer)
    close: Callable[[], None]
    if first and boundary:
        optimizer.norm_for_param_grads[key] = optimizer._constant_buffered_norm2(values)
        close = partial(_widen, out, total)
    else:
        close = partial(sums.close, key, total, out, optimizer._constant_buffered_norm2)
    channels.host.to_host(
        values,
        total,
        codec,
        raw_nbytes=raw_nbytes,
        add=not first,
        then=close if boundary else None,
    )
    if boundary:
        sums.open.pop(key, None)
    else:
        sums.open[key] = close
    if param.grad is not None and param.grad.is_cuda:
        param.grad.record_stream(torch.cuda.current_stream(param.grad.device))
    param.grad = None
    return True


def _widen(out: Tensor, total: Tensor) -> None:
    out.copy_(total)


def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients are complete before it; overflow is then found in them, as upstream does."""

    @functools.wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        channels = channels_of(self)
        if channels is not None and offloads(self):
            settle(self, channels)
        return original(self, closure)

    return step


def make_reassign(original: Callable[..., None]) -> Callable[..., None]:
    """Move the parameters of one sub-group."""

    @functools.wraps(original)
    def _reassign_or_swap_out_partitioned_parameters(self: Any, sub_group_id: int) -> None:
        channels, flat = channels_of(self), self.fp16_partitioned_groups_flat[sub_group_id]
        ours = channels is not None and offloads(self) and not self.offload_param
        if not ours or flat is None:
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

    return _reassign_or_swap_out_partitioned_parameters


def _zero_padding(params: list[Any], master: Tensor) -> None:
    """Zero what upstream left uninitialized behind the end of a parameter in its last partitions.

    It shares codec blocks with real values, never means anything, and may be NaN.
    """
    start = 0
    for param in params:
        size = param.partition_numel()
        filled = param.ds_numel - size * dist.get_rank(param.ds_process_group)
        if filled < size:
            master[start + max(0, filled) : start + size].zero_()
        start += size


def make_finalize(original: Callable[..., None]) -> Callable[..., None]:
    """Close the sums of the host, too."""

    @functools.wraps(original)
    def finalize_gradient_accumulation_boundary(self: Any) -> None:
        original(self)
        channels = channels_of(self)
        if channels is not None and offloads(self):
            device = self.fp16_partitioned_groups_flat[0].device
            for close in sums_of(self).open.values():
                channels.host.when_complete(close, on=device)

    return finalize_gradient_accumulation_boundary


def make_get_fp32_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for gradients that are being decoded."""

    @functools.wraps(original)
    def _get_fp32_grad_state_partition(self: Any, param: Any, release_swap_buffers: bool) -> Any:
        channels = channels_of(self)
        if channels is not None:
            channels.host.finish()
        return original(self, param, release_swap_buffers)

    return _get_fp32_grad_state_partition


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
