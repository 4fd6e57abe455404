"""Copy encoded tensors between device and host memory, dimension ``offload``.

On a GPU no call here adds a wait for the device: ``pinned_receive_buffers`` copies and decodes
gradients in the background, and ``finish`` waits for it where upstream is about to read them. The
payloads of several micro-batches may wait in host memory and are added in one pass over the sum.
Parameters go back in chunks: the device decodes one while the host encodes the next. Codecs of
variable size are the exception: the host learns the length of a payload only by waiting for the
device.

When training on a CPU, where device and host memory are the same, messages are encoded and decoded
immediately.

Seams of ``offload`` do not go through ``Channel.run``, whose messages have a group. A copy has two
ends and no group, and only the seam knows how many bytes native would copy: none while a sum over
micro-batches stays on the device. So the seam passes that number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from hybridcomp.channels.accounting.offload_tuner import OffloadTuner
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.engine_state import EngineState
from hybridcomp.channels.error_samples import SAMPLE_NUMEL
from hybridcomp.channels.offload.pinned_receive_buffers import (
    CHUNK_NUMEL,
    LONG_NUMEL,
    PINNED,
    Payload,
    PinnedReceiveBuffers,
    fewer_threads,
)
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.handle import Meter
from hybridcomp.dimensions import Direction

#: number of ends of a copy (device and host), passed as number of ranks to choose codecs
ENDS = 2
#: payloads that may be on the way to the device at once
UPLOADS = 4
#: micro-batches that one pass adds to the sum, so that memory is read and written once, not 4 times
PACKED = 4


@dataclass
class Packed:
    """One gradient of several micro-batches: an fp32 sum on the host and payloads to add to it."""

    total: Tensor
    waiting: list[list[Payload]] = field(default_factory=list)  # the chunks of each micro-batch
    begun: bool = False  # whether ``total`` holds a micro-batch of this step
    square: Tensor | None = None  # squared L2 norm of the complete sum

    def add_up(self, index: int, chunks: Sequence[Payload], add: bool, last: bool) -> None:
        """Add the payloads of chunk ``index`` to the sum; with ``last`` also update its norm.

        ``chunks``: one payload of each micro-batch; ``add``: False overwrites the sum first.
        """
        place = self.total[index * CHUNK_NUMEL : (index + 1) * CHUNK_NUMEL]
        for payload in chunks:
            payload.land(place, add)
            add = True
        if last:
            square = square_of(place)
            self.square = square if self.square is None else self.square + square


class HostMoves:
    """Encoded copies between device and host of one engine, and their entries in its ledger."""

    _all: ClassVar[WeakSet[HostMoves]] = WeakSet()

    def __init__(self, state: EngineState, channel: Channel) -> None:
        """Copy for the engine of ``state``; ``channel`` is its dimension ``offload``."""
        self._state = state
        self._channel = channel
        self._landing = PinnedReceiveBuffers()
        self._uploads: deque[tuple[Any, Tensor]] = deque()  # events and host buffers
        self._all.add(self)

    @property
    def pace(self) -> OffloadTuner:
        """Return the ``OffloadTuner``, which decides in which steps copies are encoded."""
        return self._state.pace

    def copy_codec(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
        """Return the codec of a copy between device and host, None for upstream's own copy."""
        if not self.pace.encodes(direction, self._state.step, self._state.policy.start_step):
            return None
        return self._channel.choose(numel, dtype, ENDS, direction)

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
        """Copy ``values`` into ``out``, which is complete after ``finish``; direction ``backward``.

        Args:
            values: 1-D contiguous fp32/bf16/fp16 on the device; read on the current stream.
            out: 1-D contiguous on the host, as many elements, of the same dtype or fp32.
            codec: from ``copy_codec``.
            raw_nbytes: bytes that upstream would have copied.
            add: accumulate into ``out``, rounding to its dtype.
            then: called when ``out`` is complete, by whichever thread completes it.
        """
        payloads = self._ship(values, codec, raw_nbytes, LONG_NUMEL)
        for payload, place in zip(payloads, torch.split(out.detach(), LONG_NUMEL), strict=True):
            self._do(partial(payload.land, place, add), values.device, (payload,))
        if then is not None:
            self._do(then, values.device)

    def pack(self, values: Tensor, packed: Packed, codec: Codec, *, raw_nbytes: int) -> None:
        """Copy ``values`` to the host and leave them encoded; arguments as for ``to_host``.

        If PACKED micro-batches already wait, they are first added up in the background.
        """
        if len(packed.waiting) == PACKED:
            self.unpack(packed, on=values.device, last=False)
        packed.waiting.append(self._ship(values, codec, raw_nbytes, CHUNK_NUMEL))

    def unpack(
        self,
        packed: Packed,
        *,
        on: torch.device,
        last: bool = True,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Add the waiting payloads to the sum; call ``then`` when that is done.

        ``last``: these payloads complete the sum, so its norm is computed. ``on``: device of the
        values.
        """
        waiting, packed.waiting = packed.waiting, []
        add, packed.begun, packed.square = packed.begun, not last, None
        for index in range(len(waiting[0]) if waiting else 0):
            chunks = [payloads[index] for payloads in waiting]
            self._do(partial(packed.add_up, index, chunks, add, last), on, chunks)
        if then is not None:
            self._do(then, on)

    def _ship(self, values: Tensor, codec: Codec, raw_nbytes: int, size: int) -> list[Payload]:
        values = values.detach()
        (only,) = codec.split_error_budget(1, 1, result=values.dtype)
        self._channel.sample(values, only, "backward")
        meter = Meter()
        meter.used[only.spec] = None
        parts = torch.split(values, size) if values.numel() else ()
        payloads = [self._landing.ship(part, only, meter) for part in parts]
        self._record(meter, raw_nbytes, "backward")
        return payloads

    def kept(self, raw_nbytes: int, *, message: bool = True) -> None:
        """Count bytes that upstream would have copied but this engine kept on the host.

        ``message``: count a message as well, where no other call does.
        """
        self._entry.messages += message
        self._entry.raw_nbytes += raw_nbytes

    def note(self) -> None:
        """Record in the ledger since which step the dimension is native, if it is."""
        since = self._state.ledger.native_since
        if self._state.pace.is_native:
            since.setdefault("offload", self._state.pace.verdict_step)

    def when_complete(self, call: Callable[[], None], *, on: torch.device) -> None:
        """Call ``call`` once all earlier copies to the host are complete."""
        self._do(call, on)

    def _do(
        self, task: Callable[[], None], device: torch.device, payloads: Sequence[Payload] = ()
    ) -> None:
        """Run ``task`` in the background if the values come from a GPU, else immediately."""
        if device.type == "cuda":
            for seconds in self._landing.submit(task, payloads):
                self._entry.codec_s += seconds
            return
        start = time.perf_counter()
        with torch.no_grad():
            task()
        self._entry.codec_s += time.perf_counter() - start

    @property
    def _entry(self) -> Any:
        return self._state.ledger.interval["offload", "backward"]

    def finish(self) -> None:
        """Wait until all copies to the host are complete; raise errors of decoding."""
        start = time.perf_counter()
        while self._landing.busy:
            self._entry.codec_s += self._landing.meet()
        self._entry.wait_s += time.perf_counter() - start

    @classmethod
    def finish_all(cls) -> None:
        """Call ``finish`` of every engine in this process; for code that knows no engine."""
        for moves in list(cls._all):
            moves.finish()

    def to_device(self, values: Tensor, out: Tensor, codec: Codec, *, raw_nbytes: int) -> None:
        """Copy ``values`` into ``out`` on the current stream; direction ``forward``.

        Args:
            values: 1-D contiguous fp32/bf16/fp16 on the host; read before this returns.
            out: 1-D contiguous on the device, as many elements. If ``codec`` is lossless or of
                variable size, values are rounded to the dtype of ``out`` before they are encoded.
            codec, raw_nbytes: as for ``to_host``.
        """
        values, out = values.detach(), out.detach()
        (only,) = codec.split_error_budget(1, 1, result=out.dtype)
        self._channel.sample(values[:SAMPLE_NUMEL].to(out.dtype), only, "forward")
        meter = Meter()
        meter.used[only.spec] = None
        for part, place in _chunks(values, out):
            with meter.coding(), fewer_threads():
                if place.is_cuda:
                    meter.sent(self._push(part, place, only))
                else:
                    payload = POOL.take(_room(only, part, place.dtype), part.device)
                    used = _encode(only, part, place.dtype, payload)
                    only.decode(payload[:used], place)
                    POOL.give(payload)
                    meter.sent(used)
        self._record(meter, raw_nbytes, "forward")

    def _push(self, part: Tensor, place: Tensor, codec: Codec) -> int:
        """Encode into pinned memory, copy, decode on the current stream; return bytes copied."""
        while len(self._uploads) >= UPLOADS:
            copied, buffer = self._uploads.popleft()
            copied.synchronize()
            PINNED.give(buffer)
        host = PINNED.take(_room(codec, part, place.dtype))
        used = _encode(codec, part, place.dtype, host)
        payload = torch.empty(used, dtype=torch.uint8, device=place.device)
        payload.copy_(host[:used], non_blocking=True)
        cuda: Any = torch.cuda
        copied = cuda.Event()
        copied.record(cuda.current_stream(place.device))
        codec.decode(payload, place)
        self._uploads.append((copied, host))
        return used

    def _record(self, meter: Meter, raw_nbytes: int, direction: Direction) -> None:
        self._state.ledger.record(("offload", direction), raw_nbytes, meter)


def square_of(values: Tensor) -> Tensor:
    """Return the squared L2 norm of fp32 values, in fp64.

    Squares of 1,024 values are summed in fp32: the relative error is 3e-9 for 4 M values and 1e-7
    for 1,024, at eight times the speed.
    """
    head = values[: values.numel() // 1024 * 1024].view(-1, 1024)
    square: Tensor = torch.linalg.vector_norm(head, dim=1).double().square().sum()
    square += values[head.numel() :].double().square().sum()
    if not 1e-30 < float(square) < 1e36:  # the fp32 squares overflow, underflow, or are not finite
        square = torch.linalg.vector_norm(values, dtype=torch.float64) ** 2
    return square


def _chunks(values: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts = torch.split(values, LONG_NUMEL), torch.split(out, LONG_NUMEL)
    yield from zip(*parts, strict=True) if values.numel() else ()


def _rounds(codec: Codec) -> bool:
    """Return whether values are cast to the device's dtype before encoding, not after decoding.

    False for lossy codecs of fixed size: the extra pass over host memory would take longer than
    encoding.
    """
    return codec.lossless or not codec.fixed_size


def _room(codec: Codec, part: Tensor, dtype: torch.dtype) -> int:
    return codec.wire_nbytes(part.numel(), dtype if _rounds(codec) else part.dtype)


def _encode(codec: Codec, part: Tensor, dtype: torch.dtype, out: Tensor) -> int:
    """Encode ``part`` for values of ``dtype`` on the device; return the bytes used."""
    if part.dtype == dtype or not _rounds(codec):
        return codec.encode(part, out)
    scratch = POOL.take(part.numel() * dtype.itemsize, part.device)
    rounded = scratch[: part.numel() * dtype.itemsize].view(dtype)
    rounded.copy_(part)
    used = codec.encode(rounded, out)
    POOL.give(scratch)
    return used
