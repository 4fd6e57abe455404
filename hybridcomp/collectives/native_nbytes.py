"""Count the bytes that one rank sends to other ranks when a message is native.

The counts assume bandwidth-optimal algorithms, as NCCL's do (nccl-tests, PERFORMANCE.md): a ring
sends ``(W-1)/W`` of the buffer in a reduce-scatter or an all-gather, twice that in an all-reduce.
Results are cached, since every message needs one and messages have few sizes.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=4096)
def all_reduce_nbytes(numel: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of an all-reduce of ``numel`` elements on every rank."""
    return 2 * (world_size - 1) * numel * dtype.itemsize // world_size


@lru_cache(maxsize=4096)
def reduce_scatter_nbytes(total_numel: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of a reduce-scatter; ``total_numel``: elements of one rank's whole input."""
    return (world_size - 1) * total_numel * dtype.itemsize // world_size


@lru_cache(maxsize=4096)
def all_gather_nbytes(shard_numel: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of an all-gather; ``shard_numel``: elements of this rank's shard."""
    return (world_size - 1) * shard_numel * dtype.itemsize


@lru_cache(maxsize=4096)
def all_to_all_nbytes(numel: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of an all-to-all of ``numel`` elements, spread evenly over the ranks.

    For uneven splits pass the elements that go to other ranks to ``send_nbytes`` instead.
    """
    return (world_size - 1) * numel * dtype.itemsize // world_size


@lru_cache(maxsize=4096)
def broadcast_nbytes(numel: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of a broadcast of ``numel`` elements: one copy for each other rank."""
    return (world_size - 1) * numel * dtype.itemsize


@lru_cache(maxsize=4096)
def send_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of ``numel`` elements sent to one other rank."""
    return numel * dtype.itemsize
