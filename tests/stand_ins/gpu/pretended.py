"""Replace torch's GPU functions by those of a ``Gpu`` during a ``with`` block."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hybridcomp import kernels
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.kernels.cuda import CudaKernels
from tests import built
from tests.stand_ins.gpu.machine import DEVICE, Gpu, Message
from tests.stand_ins.gpu.memory import Clock, Stream


class CudaStream:
    """Methods of ``torch.cuda.Stream``."""

    def __init__(self, gpu: Gpu, stream: Stream) -> None:
        self.gpu, self.of = gpu, stream
        self.cuda_stream, self.device = stream.number, DEVICE

    def wait_stream(self, other: CudaStream) -> None:
        self.of.behind(other.of.clock)
        self.gpu.order(self.of, other.of.name)

    def wait_event(self, event: CudaEvent) -> None:
        self.of.behind(event.clock)
        self.gpu.order(self.of, "an event")

    def record_event(self) -> CudaEvent:
        event = CudaEvent(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.wait("a stream", self.of.clock)


class CudaEvent:
    """Methods of ``torch.cuda.Event``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.clock: Clock = {}

    def record(self, stream: CudaStream | None = None) -> None:
        of = self.gpu.current if stream is None else stream.of
        of.step()
        self.clock = dict(of.clock)

    def synchronize(self) -> None:
        self.gpu.wait("an event", self.clock)

    def query(self) -> bool:
        return False  # the device is never finished when queried

    def elapsed_time(self, stop: CudaEvent) -> float:
        return 1.0


class Future:
    """Methods of ``torch.futures.Future`` for a DDP hook: set on one stream, awaited on another."""

    gpu: Gpu

    def __init__(self, *, devices: Sequence[torch.device] | None = None) -> None:
        assert devices == [DEVICE], "a future of a GPU's values has to know the GPU"
        self._found: tuple[Tensor, Clock] | None = None

    def set_result(self, result: Tensor) -> None:
        self._found = result, dict(self.gpu.current.clock)

    def wait(self) -> Tensor:
        assert self._found is not None, "nobody has set it"
        result, clock = self._found
        self.gpu.current.behind(clock)
        return result


@cache
def _guard() -> None:
    """Register the guard in this process."""
    if built.compiler() is None:
        pytest.skip("no C++ compiler")
    root = Path(torch.__file__).parent
    source = Path(__file__).resolve().parent / "guard.cpp"
    arguments = [
        "-std=c++20", "-O0", f"-I{root / 'include'}", str(source), f"-L{root / 'lib'}", "-lc10",
    ]  # fmt: skip
    made_of = source.read_bytes() + torch.__version__.encode()
    ctypes.CDLL(str(built.library("guard", made_of, arguments)))


@contextmanager
def pretended(ranks: int = 4, rank: int = 1) -> Iterator[Gpu]:
    """Yield a GPU of a rank over NCCL among so many. Skips if torch has GPUs."""
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA: the tests marked gpu are for it")
    _guard()
    gpu = Gpu()
    Future.gpu = gpu
    with ExitStack() as stack:
        for owner, name, value in (*_patches(gpu), *_messages(gpu, ranks, rank)):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(mock.patch.dict(kernels._on_cuda, {0: CudaKernels(gpu)}))
        stack.enter_context(mock.patch.object(payload_sizes, "SIZES", Sizes(gpu)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        yield gpu
        gpu.sweep()


class Sizes(payload_sizes.SizeReader):
    """Exchanged sizes: 64 bytes each, once the host has waited."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def copied(self, words: Tensor) -> payload_sizes.Arrival:
        found = super().copied(words)
        return Sixty(self._gpu, found._host, found._event)


class Sixty(payload_sizes.Arrival):
    """Words with the value 64."""

    def __init__(self, gpu: Gpu, host: Tensor, event: Any) -> None:
        super().__init__(host, event)
        self._gpu = gpu

    def sizes(self) -> list[int]:
        """Read them; a race unless the host has waited."""
        self._gpu.does(self._gpu.host, [self._host], [])
        return [64] * self._host.numel()


def _patches(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    cuda: Any = torch.cuda
    streams = {0: CudaStream(gpu, gpu.streams[0])}

    def current(device: object = None) -> CudaStream:
        return streams.setdefault(gpu.current.number, CudaStream(gpu, gpu.current))

    @contextmanager
    def on(stream: CudaStream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream.of
        try:
            yield
        finally:
            gpu.current = before

    def synchronize(device: object = None) -> None:
        for stream in gpu.streams:
            gpu.wait("the device", stream.clock)

    def make(device: object = None, **_: object) -> CudaStream:
        made = gpu.stream("a side stream")
        streams[made.number] = CudaStream(gpu, made)
        return streams[made.number]

    yield cuda, "current_stream", current
    yield cuda, "stream", on
    yield cuda, "Stream", make
    yield cuda, "Event", lambda enable_timing=False: CudaEvent(gpu)
    yield cuda, "is_current_stream_capturing", lambda: gpu.capturing
    yield cuda, "current_device", lambda: 0
    yield cuda, "device", lambda device: nullcontext()
    yield cuda, "get_device_capability", lambda device=None: (9, 0)
    yield cuda, "synchronize", synchronize
    yield torch.futures, "Future", Future
    yield FakeTensor, "data_ptr", lambda self: gpu.memory.address(self)
    yield FakeTensor, "record_stream", lambda self, stream: gpu.memory.record(self, stream.of)


def _messages(gpu: Gpu, ranks: int, rank: int) -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions of ``torch.distributed`` that post messages."""

    def out_of(out: Tensor, values: Tensor, *_: object, **__: object) -> Message:
        return gpu.post([values], [out])

    def in_place(values: Tensor, *_: object, **__: object) -> Message:
        return gpu.post([], [values])

    def batch(calls: Sequence[Any]) -> list[Message]:
        sends = [call.tensor for call in calls if call.op is dist.isend]
        return [gpu.post(sends, [call.tensor for call in calls if call.op is dist.irecv])]

    yield dist, "get_rank", lambda group=None: rank
    yield dist, "get_world_size", lambda group=None: ranks
    yield dist, "get_process_group_ranks", lambda group=None: list(range(ranks))
    yield dist, "get_backend_config", lambda group: "cuda:nccl"
    yield dist, "all_to_all_single", out_of
    yield dist, transport.GATHER, out_of
    yield dist, "all_reduce", in_place
    yield dist, "broadcast", in_place
    yield dist, "isend", lambda values, *_, **__: gpu.post([values], [])
    yield dist, "irecv", in_place
    yield dist, "batch_isend_irecv", batch
    yield dist, "P2POp", lambda op, tensor, peer, group=None: SimpleNamespace(op=op, tensor=tensor)
