"""Stand-in for torch.cuda's functions: each thread has a current device and stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

ops: Any = torch.ops.host_cuda
cuda: Any = torch.cuda
#: memory of every device
TOTAL = 8 << 30


def index_of(device: Any = None) -> int:
    """Return a device's index; the current device's if it has none."""
    if device is None:
        return int(ops.device())
    if isinstance(device, int):
        return int(ops.device()) if device < 0 else device
    found = torch.device(device).index
    return int(ops.device()) if found is None else int(found)


class HostStream:
    """A stream that does all its work at once."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any
    ) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.device_type = 1
        self.stream_id = int(ops.new_stream()) if stream_id is None else stream_id
        self.cuda_stream, self.priority = self.stream_id, priority

    def wait_stream(self, other: HostStream) -> None:
        assert isinstance(other, HostStream)

    def wait_event(self, event: HostEvent) -> None:
        assert isinstance(event, HostEvent)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        found = HostEvent() if event is None else event
        found.record(self)
        return found

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostStream):
            return False
        return (self.device_index, self.stream_id) == (other.device_index, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __enter__(self) -> Self:
        self._within = StreamHeld(self)
        self._within.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._within.__exit__(None, None, None)


class HostEvent:
    """An event that holds the time of its recording."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timing, self._at = enable_timing, 0.0

    def record(self, stream: HostStream | None = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: HostStream | None = None) -> None:
        """Do nothing: all work is done."""

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, stop: HostEvent) -> float:
        assert self._timing and stop._timing, "both events must be created with enable_timing=True"
        return (stop._at - self._at) * 1e3


class StreamHeld:
    """Context of ``torch.cuda.stream``: makes the stream and its device current."""

    def __init__(self, stream: HostStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            index = self._stream.device_index
            self._before = int(ops.device()), int(ops.stream(index))
            ops.set_device(index)
            ops.set_stream(index, self._stream.stream_id)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            ops.set_stream(self._stream.device_index, self._before[1])
            ops.set_device(self._before[0])


class DeviceHeld:
    """Context of ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = int(ops.device())
        ops.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        ops.set_device(self._before)


def current_stream(device: Any = None) -> HostStream:
    index = index_of(device)
    return HostStream(index, stream_id=int(ops.stream(index)))


def set_stream(stream: HostStream) -> None:
    ops.set_device(stream.device_index)
    ops.set_stream(stream.device_index, stream.stream_id)


def memory_stats(device: Any = None) -> dict[str, int]:
    held, peak = ops.held()
    return {
        "allocated_bytes.all.current": held, "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": held, "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0, "num_ooms": 0,
        "active_bytes.all.current": held, "active_bytes.all.peak": peak,
    }  # fmt: skip


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="stand-in", total_memory=TOTAL, multi_processor_count=4, major=9, minor=0,
        uuid=f"GPU-{index_of(device)}",
    )  # fmt: skip


def _resized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``UntypedStorage.resize_``, which torch without CUDA lacks for devices."""

    def resize_(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return original(self, nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        ops.resize(whole, nbytes)
        return self

    return resize_


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``storage._to``, whose constructor knows no device here."""

    def to(self: Any, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda" or isinstance(self, torch.TypedStorage):
            return original(self, device, non_blocking)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return whole.to(device).untyped_storage()

    return to


def _recorded(tensor: Tensor, stream: HostStream) -> None:
    assert tensor.is_cuda, "only tensors of a GPU are recorded on streams"
    assert isinstance(stream, HostStream)


def _false(*_: Any, **__: Any) -> bool:
    return False


def _true(*_: Any, **__: Any) -> bool:
    return True


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _held(place: int) -> Callable[..., int]:
    return lambda device=None: int(ops.held()[place])


#: replacements by name of a function of ``torch.cuda``
FUNCTIONS: dict[str, Any] = {
    "is_available": _true, "is_initialized": _true, "init": _nothing, "_lazy_init": _nothing,
    "_is_compiled": _true, "_lazy_call": lambda call, **_: call(),
    "device_count": lambda: int(ops.devices()), "current_device": index_of,
    "set_device": lambda device: ops.set_device(index_of(device)),
    "_exchange_device": lambda index: _exchanged(index),
    "_maybe_exchange_device": lambda index: _exchanged(index),
    "device": DeviceHeld, "Stream": HostStream, "Event": HostEvent, "StreamContext": StreamHeld,
    "stream": StreamHeld, "set_stream": set_stream, "current_stream": current_stream,
    "default_stream": lambda device=None: HostStream(device, stream_id=0),
    "synchronize": _nothing, "empty_cache": _nothing, "ipc_collect": _nothing,
    "is_current_stream_capturing": _false, "is_bf16_supported": _true,
    "get_device_capability": lambda device=None: (9, 0), "get_device_name": lambda *_: "stand-in",
    "get_device_properties": properties, "_get_device_properties": properties,
    "memory_stats": memory_stats, "memory_allocated": _held(0), "memory_reserved": _held(0),
    "max_memory_allocated": _held(1), "max_memory_reserved": _held(1),
    "mem_get_info": lambda device=None: (TOTAL - int(ops.held()[0]), TOTAL),
    "memory_cached": _held(0), "max_memory_cached": _held(1),
    "reset_peak_memory_stats": lambda device=None: ops.reset_peak(),
    "reset_max_memory_cached": lambda device=None: ops.reset_peak(),
    "reset_max_memory_allocated": lambda device=None: ops.reset_peak(),
    "set_sync_debug_mode": _nothing, "get_sync_debug_mode": lambda: 0, "_sleep": _nothing,
    "manual_seed": torch.default_generator.manual_seed, "initial_seed": torch.initial_seed,
    "manual_seed_all": torch.default_generator.manual_seed, "seed_all": torch.seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state.cpu()),
    "get_rng_state_all": lambda: [torch.get_rng_state()], "set_rng_state_all": _nothing,
    "can_device_access_peer": _true, "is_tf32_supported": _true, "get_arch_list": lambda: ["sm_90"],
}  # fmt: skip


def _exchanged(index: int) -> int:
    before = int(ops.device())
    if index >= 0:
        ops.set_device(index)
    return before


def place() -> None:
    """Install them in this process permanently."""
    for name, found in FUNCTIONS.items():
        setattr(cuda, name, found)
    cuda.default_generators = (torch.default_generator,) * int(ops.devices())
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, _nothing)
    cuda.nvtx.range = lambda *_, **__: nullcontext()
    cuda.nccl.version = lambda: (2, 28, 9)
    torch._C._host_emptyCache = _nothing
    native: Any = torch._C
    native._cuda_getCurrentRawStream = lambda device: int(ops.stream(device))
    native._cuda_getDevice, native._cuda_setDevice = index_of, ops.set_device
    native._cuda_exchangeDevice = native._cuda_maybeExchangeDevice = _exchanged
    native._cuda_getDeviceCount = lambda: int(ops.devices())
    storage: Any = torch.storage
    storage._to = _moved(storage._to)
    patched: Any = torch.UntypedStorage
    patched.resize_ = _resized(patched.resize_)
    tensor: Any = Tensor
    tensor.record_stream = _recorded
