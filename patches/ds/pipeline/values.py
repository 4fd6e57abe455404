"""Distinguish activations, which a codec may change, from other tensors of a pipeline message.

A stage sends a tensor or a tuple of tensors: hidden states, and often masks or position tables
beside them. DeepSpeed calls ``backward`` on every floating-point tensor of the tuple, so even an
additive mask must require grad, and ``requires_grad`` alone does not identify an activation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.codecs.base import VALUE_DTYPES

#: autograd nodes that copy or reshape values without computing new ones
MOVES = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
)  # fmt: skip


def carries_values(
    tensors: Sequence[Tensor],
    *,
    mask_last: bool = False,
    partitioned: bool = False,
    known: Sequence[bool] | None = None,
) -> list[bool]:
    """Mark the activations among ``tensors``; all others must arrive bit for bit.

    Args:
        tensors: tensors that a stage is about to send, in order.
        mask_last: the last one is a bool mask that upstream cast to half.
        partitioned: upstream cut the first activation over the tensor-parallel ranks; the tuple
            then starts with a description (int64) and this rank's part, which requires no grad.
        known: the result for a training pass, used where autograd is off and nothing requires grad.

    A lone floating-point tensor is the activation. In a tuple an activation requires grad, was
    computed in this stage rather than passed through, and takes more than two values. Reading
    values costs one pass and one host synchronization per tensor, once per set of shapes.
    """
    marks = [tensor.dtype in VALUE_DTYPES for tensor in tensors]
    if mask_last:
        marks[-1] = False
    if partitioned:
        return [mark and index == 1 for index, mark in enumerate(marks)]
    if len(tensors) == 1:
        return marks
    if not torch.is_grad_enabled():
        if known is None or len(known) != len(tensors):
            return [False] * len(tensors)
        return [mark and before for mark, before in zip(marks, known, strict=True)]
    return [
        mark and tensor.requires_grad and not passed_through(tensor) and not is_mask(tensor)
        for mark, tensor in zip(marks, tensors, strict=True)
    ]


def passed_through(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an input of this stage, only copied or reshaped."""
    if tensor.grad_fn is None:
        return not isinstance(tensor, torch.nn.Parameter)
    node = tensor.grad_fn
    while True:
        if hasattr(node, "variable"):  # a leaf of the graph
            return not isinstance(node.variable, torch.nn.Parameter)
        following = node.next_functions
        if type(node).__name__ not in MOVES or len(following) != 1 or following[0][0] is None:
            return False
        node = following[0][0]


def is_mask(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has at most two values: a mask, whose -inf no codec may change.

    This is needed for masks that come out of an activation checkpoint, whose outputs share one
    opaque autograd node.
    """
    if tensor.numel() == 0:
        return False
    values = tensor.detach()
    low, high = torch.aminmax(values)
    return bool(((values == low) | (values == high)).all())
