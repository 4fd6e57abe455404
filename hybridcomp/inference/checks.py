"""Refuse engines that cannot take 16-bit weights as they are, each in one line."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line

#: dtypes that hold weights as they were trained
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
TODO = "start the engine with the weights in 16 bits, without a quantization"


def refuse_quantized(asked: object, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PublishError where an engine computes with quantized weights.

    Args:
        asked: what the engine says of its quantization; nothing where it has none.
        tensors: the engine's parameters: integers and floats of 8 bits are taken for quantized.
    """
    if asked:
        raise PublishError(
            f"the engine's weights are quantized ({one_line(asked)}): exact 16-bit values cannot "
            f"be written into them; {TODO}"
        )
    for name, tensor in tensors:
        if tensor.dtype not in PLAIN:
            raise PublishError(
                f"{one_line(name)}: expected a weight of 16 bits in the engine, found "
                f"{tensor.dtype}: quantized weights take no exact values; {TODO}"
            )


def refuse_dtype(wanted: torch.dtype, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PublishError where published weights have another dtype than the engine's model."""
    for name, tensor in weights:
        if tensor.dtype != wanted:
            raise PublishError(
                f"{one_line(name)}: it is published in {tensor.dtype}, the engine computes in "
                f"{wanted}: values would be rounded; start the engine with dtype "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )
