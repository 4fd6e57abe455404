"""Checksums of weights: BLAKE2b of blocks, and of their digests, so that threads share the work.

BLAKE2b takes about a second for a gigabyte on one core. Two levels keep that from being the time of
a version where a host has many cores: blocks of 1 MiB are hashed by as many threads as torch has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
S = TypeVar("S")
#: bytes of a block
BLOCK = 1 << 20
SIZE = 16
#: threads by their number; a pool whose number is no longer torch's stays idle
_pools: dict[int, ThreadPoolExecutor] = {}


def in_threads(work: Callable[[T], S], items: Iterable[T]) -> list[S]:
    """Return ``work`` of every item in order, on as many threads as torch uses.

    For work that lets go of Python's lock. Raises what the first item that fails raises.
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


def digest_of(values: Tensor) -> str:
    """Return the checksum of 16-bit ``values`` on the host: 32 hexadecimal digits."""
    data = bytes_of(values.contiguous().reshape(-1))
    blocks = [data[low : low + BLOCK] for low in range(0, len(data), BLOCK)]
    return hashlib.blake2b(b"".join(in_threads(_digest, blocks)), digest_size=SIZE).hexdigest()


def _digest(block: memoryview) -> bytes:
    return hashlib.blake2b(block, digest_size=SIZE).digest()
