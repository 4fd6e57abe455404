"""Locate the values in a stage-3 partition.

Upstream cuts every parameter into equally long partitions, one per rank, and leaves the padding
after the parameter's end uninitialized: it may be NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


def filled(parameter: Any) -> int:
    """Return the elements of this rank's partition that lie before the parameter's end."""
    size = int(parameter.partition_numel())
    start = size * dist.get_rank(parameter.ds_process_group)
    return min(size, max(0, int(parameter.ds_numel) - start))


def stretches(parameters: Iterable[Any]) -> list[tuple[int, int]]:
    """Return where a flat tensor of consecutive partitions holds values.

    The result has ascending starts and ends; ranges without padding between them are joined.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for parameter in parameters:
        stop = start + filled(parameter)
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
        start += int(parameter.partition_numel())
    return found
