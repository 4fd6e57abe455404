"""Copy payloads from a device to host memory and decode them there in the background.

A message is encoded on the current stream; a second stream then copies the payload into pinned
memory, so that the copy does not delay the device's next kernels. A host thread waits for the copy
and decodes with torch's threads (``host_threads``). It runs in C++ without the GIL while the
backward pass goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.handle import Meter

#: elements of a payload that is added to others: a multiple of every codec's block and segment. At
#: 8 bits the payload takes a little less than 4 MiB, a size of pinned buffers. The fp32 sum is
#: 1.3 MB for each of 12 cores and stays in their caches while further payloads are added: four of
#: 268 M values take 50 ms on an H100's host (decoding one takes 23 ms, adding one in memory 22 ms)
CHUNK_NUMEL = 960 * 4096
#: elements of any other payload: launching one takes the host 0.2 ms, in which 8 MB cross the bus
LONG_NUMEL = 4 * CHUNK_NUMEL
#: bytes of payloads that may wait in pinned memory to be decoded
WAITING_NBYTES = 1 << 29


def host_threads() -> int:
    """Return the number of codec threads: three quarters of this rank's cores, at most torch's.

    With a thread on every core, another process slows one of them down and all threads wait for
    that one: 268 M values in 16 threads on 16 cores took 42 to 800 ms, in 12 threads 20 to 50.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    return max(1, min(torch.get_num_threads(), 3 * cores // (4 * max(1, ranks))))


@contextmanager
def fewer_threads() -> Iterator[None]:
    """Limit torch and the codecs to ``host_threads`` threads inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(host_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Pinned:
    """Pool of free pinned buffers: allocating one takes a millisecond, so they are kept."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return a 1-D uint8 tensor of at least ``nbytes`` bytes, contents undefined."""
        size = 1 << max(16, (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            if free:
                return free.pop()
        with torch.inference_mode(False):  # code outside inference_mode writes it later
            return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back that no copy reads or writes any more."""
        with self._lock:
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        with self._lock:
            self._free.clear()


#: the pinned buffers of this process
PINNED = Pinned()


@dataclass
class Payload:
    """One encoded chunk in host memory, or being copied there."""

    codec: Codec
    dtype: torch.dtype  # dtype of the encoded values
    buffer: Tensor
    used: int
    copied: Any  # CUDA event of the copy; None if it was encoded on the host

    def land(self, out: Tensor, add: bool) -> None:
        """Decode into ``out``, or with ``add`` add to it; frees the buffer.

        The copy to the host must be complete; the background thread waits for it first.
        """
        decode(self.codec, self.buffer[: self.used], out, self.dtype, add)
        (POOL if self.copied is None else PINNED).give(self.buffer)


class PinnedReceiveBuffers:
    """Bring one engine's payloads to the host and decode them in a background thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[float], int]] = deque()
        self._streams: dict[torch.device, Any] = {}

    def ship(self, part: Tensor, codec: Codec, meter: Meter) -> Payload:
        """Encode one chunk on the current stream, then copy the payload to the host."""
        with meter.coding():
            if not part.is_cuda:
                buffer = POOL.take(codec.wire_nbytes(part.numel(), part.dtype), part.device)
                found = Payload(codec, part.dtype, buffer, codec.encode(part, buffer), None)
            else:
                found = self._fetch(part, codec)
        meter.sent(found.used)
        return found

    def _fetch(self, part: Tensor, codec: Codec) -> Payload:
        cuda: Any = torch.cuda
        nbytes = codec.wire_nbytes(part.numel(), part.dtype)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=part.device)
        used = codec.encode(part, payload)
        current = cuda.current_stream(part.device)
        part.record_stream(current)  # upstream may have allocated it on another stream
        if part.device not in self._streams:
            self._streams[part.device] = cuda.Stream(part.device)
        stream = self._streams[part.device]
        stream.wait_stream(current)
        buffer = PINNED.take(used)
        with cuda.stream(stream):
            buffer[:used].copy_(payload[:used], non_blocking=True)
            copied = cuda.Event()
            copied.record(stream)
        payload.record_stream(stream)
        return Payload(codec, part.dtype, buffer, used, copied)

    def submit(self, task: Callable[[], None], payloads: Sequence[Payload]) -> list[float]:
        """Queue ``task`` on the thread; it runs after earlier ones, once ``payloads`` have arrived.

        While too many bytes wait, waits for the oldest tasks (``meet``); returns their seconds.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hybridcomp-offload")
            before, fewer = torch.get_num_threads(), host_threads()
            # set_num_threads acts on the calling thread,
            self._thread.submit(torch.set_num_threads, fewer).result()
            torch.set_num_threads(before)  # and on threads that start later: undo it for those
        nbytes = sum(payload.used for payload in payloads)
        self._waiting.append((self._thread.submit(_timed, task, payloads), nbytes))
        seconds = []
        while sum(size for _, size in self._waiting) > WAITING_NBYTES:
            seconds.append(self.meet())
        return seconds

    @property
    def busy(self) -> bool:
        """Return whether any submitted task has not been waited for by ``meet``."""
        return bool(self._waiting)

    def meet(self) -> float:
        """Wait for the oldest task and return its seconds. Raises the task's exception."""
        done, _ = self._waiting.popleft()
        return done.result()


def decode(codec: Codec, payload: Tensor, out: Tensor, dtype: torch.dtype, add: bool) -> None:
    """Decode ``payload`` (values of ``dtype``) into ``out``, or add them; round to its dtype."""
    if not add and (out.dtype == dtype or not codec.lossless):
        codec.decode(payload, out)
        return
    if add and out.dtype == torch.float32 and not codec.lossless:
        codec.decode_add(payload, out, dtype)
        return
    scratch = POOL.take(out.numel() * dtype.itemsize, out.device)
    decoded = scratch[: out.numel() * dtype.itemsize].view(dtype)
    codec.decode(payload, decoded)
    if add:
        out.add_(decoded)
    else:
        out.copy_(decoded)
    POOL.give(scratch)


@torch.no_grad()
def _timed(task: Callable[[], None], payloads: Sequence[Payload]) -> float:
    """Wait for the payloads and run ``task``; return the seconds of ``task`` alone."""
    for payload in payloads:
        payload.copied.synchronize()
    start = time.perf_counter()
    task()
    return time.perf_counter() - start
