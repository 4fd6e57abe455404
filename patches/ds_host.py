"""What the seams of ZeRO-Offload share: sums of micro-batches on the host, and exact refreshes.

Upstream adds up micro-batches on the device: each fetches the sum so far from the host, adds, and
sends it back. Here only the new gradient crosses, encoded once, and the host adds in the dtype that
upstream adds in, so that a lossless codec gives the same bits. Norm and overflow flag of a sum are
then the host's as well. No seam is here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channels, channels_of

#: attribute of an optimizer: its Sums
ATTRIBUTE = "_hybridcomp_sums"


@dataclass
class Sums:
    """Gradients of one optimizer that the host adds up, and what it found in them."""

    totals: dict[int, Tensor] = field(default_factory=dict)  # by parameter id
    #: parameters that no boundary has closed since the last step, and how to close them
    open: dict[int, Callable[[], None]] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)  # of closed ones, not yet told upstream

    def close(self, key: int, total: Tensor, out: Tensor, norm: Callable[[Tensor], Tensor]) -> None:
        """A sum is complete: give it to the optimizer, and take its norm."""
        out.copy_(total)
        self.norms[key] = norm(total)


def has(module: str, name: str, method: str) -> bool:
    """Whether a class of the installed DeepSpeed defines a method; releases of 0.19 differ."""
    return method in vars(getattr(importlib.import_module(module), name))


def sums_of(optimizer: Any) -> Sums:
    """The sums of an optimizer."""
    found: Sums | None = getattr(optimizer, ATTRIBUTE, None)
    if found is None:
        found = Sums()
        setattr(optimizer, ATTRIBUTE, found)
    return found


def settle(optimizer: Any, channels: Channels) -> bool:
    """Wait for the gradients on their way to the host and tell upstream the norms of sums.

    Returns whether one of these norms is not finite.
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
    return not finite


def at_boundary(optimizer: Any) -> bool:
    """Whether the micro-batch is the last before a step; 0.19.0 has it as a plain attribute."""
    found = optimizer.is_gradient_accumulation_boundary
    return bool(found() if callable(found) else found)


def norm_dtype(optimizer: Any) -> torch.dtype:
    """In which upstream takes norms of gradients; always fp64 in 0.19.0."""
    module = importlib.import_module("deepspeed.runtime.zero.utils")
    found = getattr(module, "get_norm_dtype", None)
    dtype: torch.dtype = torch.float64 if found is None else found()
    return dtype


def offloads(optimizer: Any) -> bool:
    """Whether copies of this optimizer between device and host go through our seams."""
    if hasattr(optimizer, "cpu_offload"):
        return bool(optimizer.cpu_offload) and not getattr(optimizer, "zenflow", False)
    return (
        bool(getattr(optimizer, "offload_optimizer", False))
        and type(optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"  # not SuperOffload's
        and not optimizer.swap_optimizer
        and optimizer.partial_offload == 1.0
    )


def sends_to_device(optimizer: Any, channels: Channels) -> bool:
    """Whether the device computes with parameters that were decoded."""
    codec = channels.policy.codecs.get(("offload", "forward"))
    return codec is not None and offloads(optimizer) and not getattr(optimizer, "offload_param", 0)


def refresh(optimizer: Any, channels: Channels, *, exact: tuple[str, ...] = ()) -> None:
    """Copy the master weights to the device again as a step would, and gather them.

    ``exact``: dimensions without their codec meanwhile. All ranks call it together.
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
