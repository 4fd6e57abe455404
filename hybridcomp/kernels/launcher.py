"""How a kernel is started on a device, and what all launches have in common."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels import images
from hybridcomp.kernels.cuda_setup import extra_of, setup

THREADS = 256  # of a block, for kernels that ask for nothing else
WARPS = THREADS // 32
WHOLE = 2**64 - 1  # no chunk is skipped
DTYPES = ("fp32", "bf16", "fp16")  # by dtype code


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


class Launcher(Protocol):
    """Starts kernels on one device."""

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS,
    ) -> None:  # fmt: skip
        """Run ``kernel`` of ``source``, compiled with ``defines``, over ``grid`` blocks.

        Every argument is a word of 64 bits: an address, a number, or the bits of a float.
        """

    def zeros(self, words: int) -> Tensor:
        """``words`` int64 zeros on the device, on the stream of the launches."""


class CupyLauncher:
    """Loads what ``images`` compiles, through CuPy, and launches on torch's current stream.

    All memory is torch's: a CUDA graph that captures the stream captures the launches.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            raise CodecError(
                f"codecs on a GPU need CuPy ({error}); pip install "
                f"'hybridcomp[{extra_of(setup())}]', or leave this dimension native"
            ) from error
        except OSError as error:  # it makes its folder when it is imported
            raise CodecError(
                f"CuPy cannot make its folder {images.cache_folder()} ({error}); set "
                "CUPY_CACHE_DIR to a folder that can be written"
            ) from error
        self._cupy: Any = cupy
        self._device = torch.device(device.type, device.index or 0)
        self._functions: dict[tuple[str, tuple[str, ...], str], Any] = {}
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._streams: dict[int, Any] = {}

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS,
    ) -> None:  # fmt: skip
        """See Launcher."""
        import numpy as np

        function = self._functions.get((source, defines, kernel))
        if function is None:
            function = self._load(source, defines, kernel)
        with self._stream():
            function(grid, (threads,), tuple(np.uint64(word) for word in words))

    def zeros(self, words: int) -> Tensor:
        """See Launcher."""
        return torch.zeros(words, dtype=torch.int64, device=self._device)

    def _stream(self) -> Any:
        pointer = torch.cuda.current_stream(self._device).cuda_stream
        if pointer not in self._streams:
            make = self._cupy.cuda.ExternalStream
            self._streams[pointer] = make(pointer, self._device.index)
        return self._streams[pointer]

    def _load(self, source: str, defines: tuple[str, ...], kernel: str) -> Any:
        device = self._cupy.cuda.Device(self._device.index)
        with device:
            module = self._modules.get((source, defines))
            if module is None:
                found = images.image(source, defines, int(device.compute_capability))
                module = self._modules[source, defines] = self._cupy.cuda.Module()
                module.load(found)
            function = self._functions[source, defines, kernel] = module.get_function(kernel)
        return function
