"""The token exchange of MoE layers (dispatch and combine).

``torch.distributed.all_to_all_single`` as ``mappings`` sees it (that seam is in ``mcore_tp``) and
not ``token_dispatcher``: its classes bind ``all_to_all`` by name, and their methods change. The
``backward`` of ``_AllToAll`` calls its ``forward``, so it is marked here.

Tokens per expert differ from rank to rank, so the length of a message must not decide its codec:
with splits ``min_bytes`` does not count, and vectors (routing probabilities, one in hidden_size of
the bytes) stay native. Counts of tokens are integers and stay native. DeepEP, HybridEP and other
dispatchers move tokens themselves; ``mcore_refuse`` says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.collectives.native import all_to_all_nbytes, send_nbytes
from hybridcomp.patches.calls import (
    direction,
    flat,
    leave_native,
    make_backward,
    route,
)
from hybridcomp.patches.mcore_attach import REQUIREMENT
from hybridcomp.patches.mcore_groups import dimension_of
from hybridcomp.patching import Seam

BACKWARD = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.tensor_parallel.mappings",
    qualname="_AllToAll.backward",
    parameters=("ctx", "grad_output"),
)

#: stands for the unknown length of a message with splits: no ``min_bytes`` is above it
ANY_NUMEL = sys.maxsize // 8


def make_all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.all_to_all_single``; splits count rows."""

    @functools.wraps(original)
    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        gives = _elements(input, input_split_sizes)
        takes = _elements(output, output_split_sizes)
        uneven = gives is not None or takes is not None
        raw = (
            all_to_all_nbytes(input.numel(), input.dtype, dist.get_world_size(group))
            if gives is None
            else send_nbytes(sum(gives) - gives[dist.get_rank(group)], input.dtype)
        )
        dimension = dimension_of(group, "ep")
        found = None
        if uneven and input.dim() < 2:
            leave_native(dimension, group, raw, direction())
        else:
            numel = ANY_NUMEL if uneven else input.numel()
            found = route(dimension, numel, input.dtype, group, raw, direction())
        if found is None:
            return original(
                output,
                input,
                output_split_sizes=output_split_sizes,
                input_split_sizes=input_split_sizes,
                group=group,
                async_op=async_op,
            )
        handle = found.channel.all_to_all(
            output.detach().view(-1),
            flat(input),
            found.codec,
            group,
            raw_nbytes=raw,
            out_splits=takes,
            in_splits=gives,
            direction=found.direction,
            async_op=async_op,
        )
        return handle if async_op else None

    return all_to_all_single


def _elements(tensor: Tensor, splits: Sequence[int] | None) -> list[int] | None:
    """Splits in elements of the flat tensor."""
    if splits is None:
        return None
    row = tensor.shape[1:].numel()
    return [int(split) * row for split in splits]


COVERS = ("ep",)
PATCHES = ((BACKWARD, make_backward),)
