"""Compute checksums of weights and find changed values, in one vectorized pass.

``xxh3_128`` detects accidental damage at memory speed; neither it nor a manifest protects against
forged weights. ``blake2b`` is the checksum of format 1, which is only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from hybridcomp.codecs.changes import change_kernels

T = TypeVar("T")
S = TypeVar("S")
BLAKE2B, XXH3 = "blake2b", "xxh3_128"
#: bytes of a block; threads share the work by blocks
BLOCK = 1 << 20
SIZE = 16
#: values per element of a mask
MASKED = 32
#: thread pools by number of threads; a pool of another size than torch's number is idle
_pools: dict[int, ThreadPoolExecutor] = {}


def in_threads(work: Callable[[T], S], items: Iterable[T]) -> list[S]:
    """Return ``work`` of every item in order, using as many threads as torch does.

    For work that releases the GIL. Raises the error of the first item that fails.
    """
    every, threads = list(items), torch.get_num_threads()
    if threads < 2 or len(every) < 2:
        return [work(item) for item in every]
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="hybridcomp_publish")
    return list(_pools[threads].map(work, every))


def bytes_of(values: Tensor) -> memoryview:
    """Return a view of the bytes of a tensor on the host: 1-D and contiguous."""
    found: memoryview = values.detach().view(torch.uint8).numpy().data
    return found


def digest_of(values: Tensor, checksum: str = XXH3) -> str:
    """Return the checksum of ``values`` on the host: 32 hexadecimal digits."""
    flat = values.contiguous().reshape(-1)
    if checksum == BLAKE2B:
        data = bytes_of(flat)
        blocks = [data[low : low + BLOCK] for low in range(0, len(data), BLOCK)]
        return hashlib.blake2b(b"".join(in_threads(_blake2b, blocks)), digest_size=SIZE).hexdigest()
    return change_kernels().digest(flat.data_ptr(), flat.nbytes, torch.get_num_threads()).hex()


def _blake2b(block: memoryview) -> bytes:
    return hashlib.blake2b(block, digest_size=SIZE).digest()


def compare(values: Tensor, old: Tensor, mask: Tensor | None = None) -> tuple[int, str]:
    """Return how many values differ in any bit, and the checksum of ``values``, in one pass.

    Args:
        values, old: 1-D, contiguous, of one 16-bit dtype and size, on the host.
        mask: result of ``empty_mask``; receives a bit for each value, set if it differs.
    """
    where = 0 if mask is None else mask.data_ptr()
    changed, digest = change_kernels().compare(
        values.data_ptr(), old.data_ptr(), values.numel(), where, torch.get_num_threads()
    )
    return changed, digest.hex()


def empty_mask(numel: int) -> Tensor:
    """Return room for one bit per value of ``numel`` values: 1-D int32."""
    return torch.empty(-(-numel // MASKED), dtype=torch.int32, device="cpu")
