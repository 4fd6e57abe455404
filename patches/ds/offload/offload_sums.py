"""Copy parameters encoded under ZeRO-Offload, and handle steps and exact refreshes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridcomp.channels import Channels, channels_of
from hybridcomp.log import say
from hybridcomp.patches.ds.offload.offload_accumulation import forget, sums_of
from hybridcomp.patches.ds.zero import node_sums
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import has_module


def has(module: str, name: str, method: str) -> bool:
    """Return whether a class of the installed DeepSpeed has a method; releases of 0.19 differ.

    Without DeepSpeed it returns False: seams can then be listed but not applied.
    """
    return has_module(module) and method in vars(getattr(importlib.import_module(module), name))


class Uploads(TorchFunctionMode):
    """Encode the copies from the optimizer's 16-bit host buffers to the device."""

    def __init__(self, optimizer: Any, channels: Channels) -> None:
        super().__init__()
        self._channels = channels
        buffers = optimizer.param_buffer_of_bit16_for_cpu_offload_groups
        self._buffers = {_start(buffer) for buffer in buffers if buffer.numel()}
        # by buffer, the masters whose rounded values it should hold
        self._waiting: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_ and len(args) > 1 and isinstance(args[1], Tensor):
            out, values = args[0], args[1]
            if _start(out) in self._buffers and values.shape == out.shape:
                # a separate pass that rounds to 16 bits would take longer than encoding
                self._waiting[_start(out)] = values
                return out
            if _start(values) in self._buffers:
                masters = self._waiting.pop(_start(values), values)
                if upload(self._channels, masters, out):
                    return out
                if masters is not values:
                    values.copy_(masters)
        return func(*args, **(kwargs or {}))


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def upload(channels: Channels, values: Tensor, out: Tensor) -> bool:
    """Copy updated parameters to ``out`` on the device, encoded; return False if left to
    upstream.
    """
    raw_nbytes = out.numel() * out.itemsize
    codec = channels.host.copy_codec(out.numel(), out.dtype, "forward")
    if codec is None:
        channels["offload"].count_native(raw_nbytes, "forward")
        return False
    channels.host.to_device(values, out, codec, raw_nbytes=raw_nbytes)
    return True


def count_last_copy(channels: Channels, out: Tensor, raw_nbytes: int) -> None:
    """Count the native copy of a complete sum to ``out``, and upstream's earlier copies as kept."""
    last = out.numel() * out.itemsize
    channels["offload"].count_native(last, "backward")
    channels.host.kept(raw_nbytes - last, message=False)


def make_step(
    original: Callable[..., Any],
    uploads: Callable[[Any, Channels], AbstractContextManager[Any]] = lambda *_: nullcontext(),
) -> Callable[..., Any]:
    """Wait for the gradients before upstream's step, which checks them for overflow.

    ``uploads``: takes optimizer and channels; makes a context for the step in which parameter
    copies are encoded.
    """

    @functools.wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        channels = channels_of(self)
        if channels is None or not offloads(self):
            return original(self, closure)
        settle(self, channels)
        channels.pace.start(channels.step, channels.policy.start_step)
        with uploads(self, channels):
            result = original(self, closure)
        close_step(self, channels)
        return result

    return step


def settle(optimizer: Any, channels: Channels) -> None:
    """Wait for gradients being copied to the host, and pass the norms of sums to the optimizer.

    If any of these norms is not finite, it sets ``local_overflow``, which stages 1 and 2 have.
    """
    from deepspeed.accelerator import get_accelerator

    channels.host.finish()
    sums = sums_of(optimizer)
    device = get_accelerator().current_device_name()
    finite = all(bool(norm.isfinite()) for norm in sums.norms.values())
    for key, norm in sums.norms.items():
        optimizer.norm_for_param_grads[key] = norm.to(device)
    sums.norms.clear()
    sums.open.clear()
    if not finite and hasattr(optimizer, "local_overflow"):
        optimizer.local_overflow = True


def close_step(optimizer: Any, channels: Channels) -> None:
    """Record the end of a step for ``OffloadTuner``; free the sums if its verdict is native."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    pace, skipped = channels.host.pace, bool(getattr(optimizer, "overflow", False))
    told = pace.took(channels.step, device, skipped=skipped)
    say(*told)
    if told and not pace.encodes("backward", channels.step + 1, channels.policy.start_step):
        forget(optimizer)
    channels.host.note()


def norm_dtype(optimizer: Any) -> torch.dtype:
    """Return the dtype in which upstream takes norms of gradients; always fp64 in 0.19.0."""
    module = importlib.import_module("deepspeed.runtime.zero.utils")
    found = getattr(module, "get_norm_dtype", None)
    dtype: torch.dtype = torch.float64 if found is None else found()
    return dtype


@around
def make_finalize(original: Any, self: Any) -> None:
    """Close the open sums at a boundary set by the script; one method for stages 1, 2 and 3.

    First, sums kept inside nodes are sent between them.
    """
    node_sums.cross(self)
    original(self)
    channels = channels_of(self)
    if channels is not None and offloads(self):
        sums = sums_of(self)
        for key in list(sums.open):
            sums.open.pop(key)()


def offloads(optimizer: Any) -> bool:
    """Return whether the seams see this optimizer's copies between device and host."""
    if hasattr(optimizer, "cpu_offload"):
        return bool(optimizer.cpu_offload) and not getattr(optimizer, "zenflow", False)
    return (
        bool(getattr(optimizer, "offload_optimizer", False))
        # excludes SuperOffload's optimizer
        and type(optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
        and not optimizer.swap_optimizer
    )


def sends_to_device(optimizer: Any, channels: Channels) -> bool:
    """Return whether parameters are encoded when copied to the device."""
    codec = channels.policy.codecs.get(("offload", "forward"))
    return codec is not None and offloads(optimizer) and not getattr(optimizer, "offload_param", 0)


def refresh(optimizer: Any, channels: Channels, *, exact: tuple[str, ...] = ()) -> None:
    """Copy the master weights to the device again, as in a step, and gather them; a collective.

    ``exact``: dimensions whose messages are native meanwhile.
    """
    assert channels_of(optimizer) is channels
    with ExitStack() as stack:
        for channel in channels:
            if channel.dimension in exact:
                stack.enter_context(channel.suspended())
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
