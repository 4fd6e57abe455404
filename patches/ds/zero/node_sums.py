"""Send sums over micro-batches between nodes before a step (``dp.accumulate``).

``zero12`` and ``zero3`` mark each message of the step's last micro-batch. This module reduces the
rest: sums of parameters without a gradient in the last micro-batch. At the end of that backward
pass they get zeros as gradients, which upstream reduces like all others.

Seams:

* ``independent_gradient_partition_epilogue`` of stages 2 and 3, which ends a backward pass.
* ``zero_grad`` of stage 3, where upstream drops the gradients accumulated so far, and the nodes
  drop their sums; at stage 2 upstream keeps the gradients, and the nodes keep their sums.

A script may set the boundary only after the last backward pass (``managed_gradient_accumulation``
false); then ``attach`` and ``offload_sums`` send all sums in the step. Checkpoints hold no sums,
as upstream's hold no gradients; a load drops sums, and so does ``destroy``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hybridcomp.channels import NAME, channels_of
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

STAGE2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE3 = "deepspeed.runtime.zero.stage3"
EPILOGUE = "independent_gradient_partition_epilogue"
EPILOGUES = (
    Seam(REQUIREMENT, STAGE2, f"DeepSpeedZeroOptimizer.{EPILOGUE}", ("self",)),
    Seam(REQUIREMENT, STAGE3, f"DeepSpeedZeroOptimizer_Stage3.{EPILOGUE}", ("self",)),
)
ZERO_GRAD = Seam(
    REQUIREMENT, STAGE3, "DeepSpeedZeroOptimizer_Stage3.zero_grad", ("self", "set_to_none")
)
#: whether an optimizer step follows although upstream is not at a boundary
_CROSSING: Scope[bool] = Scope("node_sums_cross", False)


def crosses(optimizer: Any) -> bool:
    """Return whether the current reduction is the last one before a step."""
    return _CROSSING.get() or at_boundary(optimizer)


def at_boundary(optimizer: Any) -> bool:
    """Return whether this micro-batch is the last before a step; a plain attribute in 0.19.0."""
    found = optimizer.is_gradient_accumulation_boundary
    return bool(found() if callable(found) else found)


def cross(optimizer: Any) -> None:
    """Send the sums that are still unsent between nodes; every rank calls this before a
    step.
    """
    channels = channels_of(optimizer)
    if channels is None or not channels.node_sums.left:
        return
    with _CROSSING.inside(True):
        optimizer.independent_gradient_partition_epilogue()


@around
def make_epilogue(original: Any, self: Any) -> None:
    """Reduce zeros for parameters with unsent sums before upstream ends the backward pass."""
    channels = channels_of(self)
    if channels is not None and channels.node_sums.left and crosses(self):
        _reduce_zeros(self, channels.node_sums.left)
    original(self)


def _reduce_zeros(optimizer: Any, left: set[str]) -> None:
    """Add to a bucket, with zero gradients, those parameters of ``left`` that are in none."""
    if hasattr(optimizer, "bit16_groups"):
        waiting = {
            param_id for bucket in optimizer.ipg_buckets.values() for *_, param_id in bucket.params
        }
        for index, group in enumerate(optimizer.bit16_groups):
            for param in _named(group, left):
                if optimizer.get_param_id(param) not in waiting:
                    param.grad = torch.zeros_like(param)
                    optimizer.process_gradients(param, index)
        return
    waiting = {id(param) for bucket in optimizer.ipg_buckets.values() for param in bucket.params}
    for group in optimizer.fp16_groups:
        for param in _named(group, left):
            if id(param) not in waiting:
                param.grad = torch.zeros_like(param.data)
                # unpartitioned shape, as gradients have in a backward pass
                param.grad.data = param.data.new_zeros(param.ds_shape)
                optimizer.reduce_ready_partitions_and_remove_grads(param)


def _named(group: Any, names: set[str]) -> Iterator[Any]:
    return (param for param in group if getattr(param, NAME, None) in names)


@around
def make_zero_grad(original: Any, self: Any, set_to_none: bool = True) -> None:
    """Drop the sums over the micro-batches so far, as upstream drops their gradients."""
    original(self, set_to_none)
    channels = channels_of(self)
    if channels is not None:
        channels.node_sums.drop()


PATCHES = (*((seam, make_epilogue) for seam in EPILOGUES), (ZERO_GRAD, make_zero_grad))
