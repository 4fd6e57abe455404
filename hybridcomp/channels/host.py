"""Moves between the memory of a device and that of its host, dimension ``offload``.

On a GPU nothing here waits for the device that upstream would not have waited for: a message is
encoded on the current stream and copied into pinned memory behind it, and a thread of the host
decodes it when the copy is through, while the backward pass goes on; ``finish`` meets that thread
where upstream is about to read. The way back is encoded in chunks, of which the device decodes one
while the host encodes the next. Codecs of variable size are the exception: on a device they know
the length of a payload only after waiting for it.

Where device and host are the same memory, as in a training on a CPU, the same messages take the
same codecs, at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from hybridcomp.channels.samples import SAMPLE_NUMEL
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.buffers import POOL
from hybridcomp.collectives.meter import Meter
from hybridcomp.policy import Direction

if TYPE_CHECKING:
    from hybridcomp.channels import Channels

#: elements of one payload; a multiple of every codec's block and segment. 8 bits of so many cross
#: a bus of 50 GB/s in 84 us, which is what launching one takes twice over
CHUNK_NUMEL = 1 << 22
#: bytes of payloads that may wait in pinned memory for the decoding thread
WAITING_NBYTES = 1 << 28
#: chunks that may be on their way to the device
UPLOADS = 4


class HostMoves:
    """Encoded copies between device and host of one engine, and their entries in its ledger."""

    _all: ClassVar[WeakSet[HostMoves]] = WeakSet()

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[float], int]] = deque()
        self._uploads: deque[Any] = deque()  # events
        self._all.add(self)

    def to_host(
        self,
        values: Tensor,
        out: Tensor,
        codec: Codec,
        *,
        raw_nbytes: int,
        add: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Copy ``values`` into ``out``, which holds them after ``finish``; direction ``backward``.

        Args:
            values: 1-D contiguous fp32/bf16/fp16 on the device; read on the current stream.
            out: 1-D contiguous on the host, as many elements, of the same dtype or fp32.
            codec: what ``Channel.copy_codec`` chose.
            raw_nbytes: what upstream would have moved.
            add: accumulate into ``out``, rounding to its dtype.
            then: called when ``out`` is complete, by whichever thread completes it.
        """
        values, out = values.detach(), out.detach()
        (only,) = codec.hops(1, 1, result=values.dtype)
        self._channels["offload"].samples.take(values, only, "backward")
        meter = Meter()
        meter.use(only.spec)
        for part, place in _chunks(values, out):
            if part.is_cuda:
                self._fetch(part, place, only, add, meter)
            else:
                with meter.coding():
                    payload = POOL.take(only.wire_nbytes(part.numel(), part.dtype), part.device)
                    used = only.encode(part, payload)
                    _decode(only, payload[:used], place, part.dtype, add)
                    POOL.give(payload)
                meter.sent(used)
        self._record(meter, raw_nbytes, "backward")
        if then is not None:
            self.when_complete(then, on=values.device)

    def _fetch(self, part: Tensor, place: Tensor, codec: Codec, add: bool, meter: Meter) -> None:
        """Encode on the current stream, copy behind it, leave the rest to the thread."""
        with meter.coding():
            payload = torch.empty(
                codec.wire_nbytes(part.numel(), part.dtype), dtype=torch.uint8, device=part.device
            )
            used = codec.encode(part, payload)
        part.record_stream(torch.cuda.current_stream(part.device))  # upstream may have another one
        host = torch.empty(used, dtype=torch.uint8, pin_memory=True)
        host.copy_(payload[:used], non_blocking=True)
        copied, dtype = _marked(part.device), part.dtype

        def land() -> float:
            copied.synchronize()
            start = time.perf_counter()
            _decode(codec, host, place, dtype, add)
            return time.perf_counter() - start

        meter.sent(used)
        self._submit(land, used)

    def when_complete(self, call: Callable[[], None], *, on: torch.device) -> None:
        """Call when everything that was copied to the host before is there."""
        if on.type != "cuda":
            call()
            return

        def land() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        self._submit(land, 0)

    def _submit(self, land: Callable[[], float], nbytes: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hybridcomp-offload")
        self._waiting.append((self._thread.submit(_quietly, land), nbytes))
        while sum(size for _, size in self._waiting) > WAITING_NBYTES:
            self._meet()

    def finish(self) -> None:
        """Wait until everything that was copied to the host is there.

        Raises what decoding raised.
        """
        while self._waiting:
            self._meet()

    @classmethod
    def finish_all(cls) -> None:
        """``finish`` of every engine of this process, for readers that know no engine."""
        for moves in list(cls._all):
            moves.finish()

    def _meet(self) -> None:
        """Wait for the oldest task of the thread."""
        done, _ = self._waiting.popleft()
        start = time.perf_counter()
        seconds = done.result()
        entry = self._channels.ledger.interval["offload", "backward"]
        entry.wait_s += time.perf_counter() - start
        entry.codec_s += seconds

    def to_device(self, values: Tensor, out: Tensor, codec: Codec, *, raw_nbytes: int) -> None:
        """Copy ``values`` into ``out`` on the current stream; direction ``forward``.

        Args:
            values: 1-D contiguous fp32/bf16/fp16 on the host; read before this returns.
            out: 1-D contiguous on the device, as many elements; values are rounded to its dtype
                before they are encoded.
            codec, raw_nbytes: as for ``to_host``.
        """
        values, out = values.detach(), out.detach()
        (only,) = codec.hops(1, 1, result=out.dtype)
        self._channels["offload"].samples.take(values[:SAMPLE_NUMEL].to(out.dtype), only, "forward")
        meter = Meter()
        meter.use(only.spec)
        for part, place in _chunks(values, out):
            with meter.coding():
                rounded = part.to(place.dtype)
                nbytes = only.wire_nbytes(rounded.numel(), rounded.dtype)
                if place.is_cuda:
                    meter.sent(self._push(rounded, place, only, nbytes))
                else:
                    payload = POOL.take(nbytes, rounded.device)
                    used = only.encode(rounded, payload)
                    only.decode(payload[:used], place)
                    POOL.give(payload)
                    meter.sent(used)
        self._record(meter, raw_nbytes, "forward")

    def _push(self, part: Tensor, place: Tensor, codec: Codec, nbytes: int) -> int:
        """Encode into pinned memory, copy, decode on the current stream; the bytes copied."""
        while len(self._uploads) >= UPLOADS:
            self._uploads.popleft().synchronize()
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        used = codec.encode(part, host)
        payload = torch.empty(used, dtype=torch.uint8, device=place.device)
        payload.copy_(host[:used], non_blocking=True)  # torch keeps ``host`` until this is through
        codec.decode(payload, place)
        self._uploads.append(_marked(place.device))
        return used

    def _record(self, meter: Meter, raw_nbytes: int, direction: Direction) -> None:
        self._channels.ledger.record(("offload", direction), raw_nbytes, meter)


def _marked(device: torch.device) -> Any:
    """An event behind what the current stream has to do so far."""
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


def _chunks(values: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts = torch.split(values, CHUNK_NUMEL), torch.split(out, CHUNK_NUMEL)
    yield from zip(*parts, strict=True) if values.numel() else ()


def _decode(codec: Codec, payload: Tensor, out: Tensor, dtype: torch.dtype, add: bool) -> None:
    """``payload`` of values of ``dtype`` into ``out``, or onto it."""
    if not add and (out.dtype == dtype or not codec.lossless):
        codec.decode(payload, out)
        return
    decoded = torch.empty(out.numel(), dtype=dtype)
    codec.decode(payload, decoded)
    if add:
        out.add_(decoded)
    else:
        out.copy_(decoded)


@torch.no_grad()
def _quietly(land: Callable[[], float]) -> float:
    return land()
