"""Start kernels on a device, with the constants of all launches."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import hip, images
from hybridcomp.kernels.cuda.setup import install_of, setup
from hybridcomp.kernels.cuda.workspaces import Workspaces

THREADS = 256  # threads per block, unless a kernel needs another number
WARPS = THREADS // 32
WHOLE = 2**64 - 1  # value of ``skip`` if no chunk is skipped
DTYPES = ("fp32", "bf16", "fp16")  # names by dtype code
LIBCUDA = "libcuda.so.1"
#: int64 words of a table
Words = npt.NDArray[np.int64]
cuda: Any = torch.cuda  # parts of torch.cuda are untyped


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


class Launcher(Protocol):
    """Starts kernels on one device."""

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS, table: bytes | None = None,
    ) -> None:  # fmt: skip
        """Run ``kernel`` of ``source``, compiled with ``defines``, over ``grid`` blocks.

        ``words`` are the kernel's arguments, 64 bits each: an address, a number, or the bits of a
        float. ``table``, if given, is passed by value before them.
        """

    def zeros(self, words: int) -> Tensor:
        """Return ``words`` int64 zeros on the device, ready on the stream of the launches."""

    def empty(self, words: int) -> Tensor:
        """Return ``words`` uninitialized int64 on the device."""

    def words(self, values: Words) -> Tensor:
        """Copy ``values`` to the device, on the stream of the launches, without waiting."""


class CudaLauncher:
    """Loads images compiled by ``images``, through CuPy, and launches on torch's current stream.

    All memory is allocated by torch, so a CUDA graph that captures the stream can capture the
    launches. If another context (on AMD's GPUs another device) is current in the thread, a launch
    switches to this device's context and back.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy = _cupy()
        self._device = torch.device(device.type, device.index or 0)
        self._index: int = self._device.index
        self._extension = _extension()
        if hip.version():
            warnings.warn(hip.NEVER_RUN, stacklevel=2)
        self._start: Callable[..., None] = self._extension.launch
        self._stream = stream_getter()
        self._workspaces = Workspaces(self._zeroed)
        #: address and context of each kernel
        self._functions: dict[tuple[str, tuple[str, ...], str], tuple[int, int]] = {}
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        #: if two threads loaded the same module, the second load would unload the first and leave
        #: its function addresses dangling
        self._loading = threading.Lock()

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS, table: bytes | None = None,
    ) -> None:  # fmt: skip
        """See Launcher. Raises RuntimeError with the driver's message."""
        found = self._functions.get((source, defines, kernel))
        if found is None:
            found = self._load(source, defines, kernel)
        stream = self._stream(self._index)
        self._start(found[0], found[1], grid[0], grid[1], threads, stream, table, *words)

    def zeros(self, words: int) -> Tensor:
        """See Launcher. A captured graph zeroes its words at every replay."""
        if cuda.is_current_stream_capturing():
            return self._zeroed(words)
        return self._workspaces.take(words, self._stream(self._index))

    def empty(self, words: int) -> Tensor:
        """See Launcher."""
        return torch.empty(words, dtype=torch.int64, device=self._device)

    def words(self, values: Words) -> Tensor:
        """See Launcher. A captured graph would read the host's memory at every replay."""
        host = torch.empty(values.shape, dtype=torch.int64, pin_memory=True, device="cpu")
        host.numpy()[...] = values
        return host.to(self._device, non_blocking=True)

    def _zeroed(self, words: int) -> Tensor:
        # these words are kept, and may be written outside inference_mode
        with torch.inference_mode(False):
            return torch.zeros(words, dtype=torch.int64, device=self._device)

    def _architecture(self, device: Any) -> images.Architecture:
        return hip.target(self._index) if hip.version() else int(device.compute_capability)

    def _load(self, source: str, defines: tuple[str, ...], kernel: str) -> tuple[int, int]:
        cuda.init()  # torch creates the primary context, which everything shares
        device = self._cupy.cuda.Device(self._index)
        with device:
            # do not hold the lock while compiling, which takes seconds
            if (source, defines) not in self._modules:
                found = images.image(source, defines, self._architecture(device))
            with self._loading:
                module = self._modules.get((source, defines))
                if module is None:
                    self._cupy.cuda.runtime.free(0)  # makes the context current in this thread
                    module = self._cupy.cuda.Module()
                    module.load(found)
                    self._modules[source, defines] = module
                address = int(module.get_function(kernel).ptr)
                both = self._functions[source, defines, kernel] = (
                    address, self._extension.current_context()
                )  # fmt: skip
        return both


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CodecError(
            f"codecs on a GPU need CuPy ({error}); {install_of(setup())}, or leave this dimension "
            "native"
        ) from error
    except OSError as error:  # CuPy creates its folder on import
        raise CodecError(
            f"CuPy cannot make its folder {images.cache_folder()} ({error}); set "
            "CUPY_CACHE_DIR to a folder that can be written"
        ) from error
    if hip.version() and not cupy.cuda.runtime.is_hip:
        raise CodecError(
            f"torch is built for ROCm, and the CuPy that is installed for CUDA: uninstall it, then "
            f"{hip.install()}, or leave this dimension native"
        )
    return cupy


@cache
def _extension() -> Any:
    """Load ``launch.cpp``'s extension, with the driver's library open. Raises CodecError."""
    try:
        extension = importlib.import_module("hybridcomp.kernels._launch")
    except ImportError as error:
        raise CodecError(
            f"what launches GPU kernels is not built ({error}); build it with `pip install .`, or "
            "with `pip install --no-build-isolation -e .` in a checkout (needs a C++17 compiler)"
        ) from error
    try:
        extension.open_driver(hip.library() if hip.version() else LIBCUDA)
    except OSError as error:
        kind, owner = ("ROCm", "AMD") if hip.version() else ("CUDA", "NVIDIA")
        raise CodecError(f"no {kind} driver was found ({error}); install {owner}'s") from error
    return extension


def stream_getter() -> Callable[[int], int]:
    """Return a function that returns the address of torch's current stream on a device.

    torch's raw getter, which Triton uses as well, costs 0.1 us; a stream object costs 2 us.
    """
    found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return found or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))
