"""The CUDA back end: what is launched, with which grid, over which arguments.

The kernels are the ``.cu`` files beside this one, around the headers that the CPU uses; their bytes
are the CPU's. :class:`CudaKernels` does not know how a kernel is started: a :class:`Launcher` does.
``CupyLauncher`` loads images that NVRTC compiles and launches on torch's current stream; the tests
have one that runs the same sources on the host.

Nothing here waits for the device, except encoders of variable size that are asked to return it;
those that are given the address of a word leave the size there.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels import images

THREADS = 256  # of a block, for every kernel
WARPS = THREADS // 32
WHOLE = 2**64 - 1  # no chunk is skipped
DTYPES = ("fp32", "bf16", "fp16")  # by dtype code
FORMATS = ("e4m3", "e5m2")
ALIGN = 16


class Launcher(Protocol):
    """Starts kernels on one device."""

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int], *words: int
    ) -> None:
        """Run ``kernel`` of ``source``, compiled with ``defines``, over ``grid`` blocks of THREADS.

        Every argument is a word of 64 bits: an address, a number, or the bits of a float.
        """

    def zeros(self, words: int) -> Tensor:
        """``words`` int64 zeros on the device, on the stream of the launches."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class CudaKernels:
    """The functions of ``kernels.Kernels`` on a device; arguments are described there.

    Raises ValueError for a payload that does not begin at a multiple of 16 bytes.
    """

    STORES_SIZES = True  # kernels.stores_sizes

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @cached_property
    def _damage(self) -> Tensor:
        """Set by decoders that met a payload which no encoder made."""
        return self._launcher.zeros(1)

    def check(self) -> None:
        """Wait for the device; raise CodecError if a payload was damaged since the last check."""
        if int(self._damage):
            self._damage.zero_()
            raise CodecError("a payload decoded on the GPU since the last check is damaged")

    def blockint_encode(
        self, setting: int, dtype: int, values: int, numel: int, out: int, nbytes: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """One warp a tile of 1024 values."""
        self._fixed(
            "blockint.cu", _blockint(setting), "blockint_encode", out,
            _ceil_div(numel, 1024 * WARPS), (values, numel, numel, 0, WHOLE, out, dtype),
        )  # fmt: skip

    def blockint_decode(
        self, setting: int, dtype: int, payload: int, nbytes: int, out: int, numel: int,
        add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """One warp a tile."""
        self._fixed(
            "blockint.cu", _blockint(setting),
            "blockint_add" if add else f"blockint_decode_{DTYPES[dtype]}", payload,
            _ceil_div(numel, 1024 * WARPS), (payload, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def blockint_fused(self, setting: int) -> FusedBlockInt:
        """Kernels for all chunks of an all_reduce."""
        return FusedBlockInt(self._launcher, setting)

    def fp8_encode(
        self, form: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int, /
    ) -> None:
        """256 threads a block of 4096 values."""
        self._fixed(
            "casts.cu", (), f"fp8_{FORMATS[form]}_encode_{DTYPES[dtype]}", out,
            _ceil_div(numel, 4096), (values, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def fp8_decode(
        self, form: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """256 threads a block."""
        name = f"fp8_{FORMATS[form]}_" + ("add" if add else f"decode_{DTYPES[dtype]}")
        self._fixed(
            "casts.cu", (), name, payload, _ceil_div(numel, 4096),
            (payload, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def zfp_encode(
        self, maxbits: int, dtype: int, values: int, numel: int, out: int, nbytes: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """A thread a block of 4 values."""
        self._fixed(
            "zfp.cu", (), f"zfp_encode_{DTYPES[dtype]}", out, _ceil_div(numel, 4 * THREADS),
            (values, numel, numel, 0, WHOLE, maxbits, out),
        )  # fmt: skip

    def zfp_decode(
        self, maxbits: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """A thread a block."""
        self._fixed(
            "zfp.cu", (), "zfp_add" if add else f"zfp_decode_{DTYPES[dtype]}", payload,
            _ceil_div(numel, 4 * THREADS), (payload, numel, numel, 0, WHOLE, maxbits, out),
        )  # fmt: skip

    def cast(
        self, source: int, to: int, values: int, out: int, numel: int, add: bool, threads: int, /
    ) -> None:
        """Four values a thread. Between equal dtypes the bits move, NaN payloads included."""
        name = f"add_{DTYPES[source]}" if add else f"cast_{DTYPES[source]}_{DTYPES[to]}"
        if numel:
            grid = (_ceil_div(numel, 4 * THREADS), 1)
            self._launcher.launch("casts.cu", (), name, grid, values, numel, out)

    def mpc_encode(
        self, dim: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """A warp a chunk of 1024 words."""
        words = numel if dtype == 0 else _ceil_div(numel, 2)
        tiles = _ceil_div(words, 1024 * WARPS)
        arguments = (values, numel, dim, dtype, out)
        return self._variable("mpc.cu", "mpc_encode", out, tiles, arguments, size)

    def mpc_decode(
        self, dim: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Damage is told by ``check``."""
        words = numel if dtype == 0 else _ceil_div(numel, 2)
        tiles = _ceil_div(words, 1024 * WARPS)
        work = self._launcher.zeros(1 + tiles)
        self._fixed(
            "mpc.cu", (), "mpc_add" if add else "mpc_decode", payload, tiles,
            (payload, nbytes, numel, dim, dtype, out, work.data_ptr(), self._damage.data_ptr()),
        )  # fmt: skip

    def radix_encode(
        self, segment: int, relative: bool, bound: float, dtype: int, values: int, numel: int,
        out: int, nbytes: int, threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """256 threads a segment."""
        words = (values, numel, segment, _float_bits(bound), int(relative), dtype, out)
        tiles = _ceil_div(numel, segment)
        return self._variable("radix.cu", f"radix_encode_{DTYPES[dtype]}", out, tiles, words, size)

    def radix_decode(
        self, segment: int, relative: bool, bound: float, dtype: int, payload: int, nbytes: int,
        out: int, numel: int, add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """256 threads a segment. Damage is told by ``check``."""
        self._fixed(
            "radix.cu", (), "radix_add" if add else f"radix_decode_{DTYPES[dtype]}", payload,
            _ceil_div(numel, segment),
            (payload, nbytes, numel, segment, _float_bits(bound), int(relative), out,
             self._damage.data_ptr()),
        )  # fmt: skip

    def expcode_encode(
        self, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """256 threads a tile of 2048 values."""
        kernel, words = f"expcode_encode_{DTYPES[dtype]}", (values, numel, dtype, out)
        return self._variable("expcode.cu", kernel, out, _ceil_div(numel, 2048), words, size)

    def expcode_decode(
        self, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """256 threads a tile. Damage is told by ``check``."""
        self._fixed(
            "expcode.cu", (), f"expcode_{'add' if add else 'decode'}_{DTYPES[dtype]}", payload,
            _ceil_div(numel, 2048),
            (payload, nbytes, numel, dtype, out, self._damage.data_ptr()),
        )  # fmt: skip

    def _fixed(
        self, source: str, defines: tuple[str, ...], kernel: str, payload: int, blocks: int,
        words: tuple[int, ...],
    ) -> None:  # fmt: skip
        if payload % ALIGN:
            raise ValueError(f"{kernel}: the payload must begin at a multiple of {ALIGN} bytes")
        if blocks:
            self._launcher.launch(source, defines, kernel, (blocks, 1), *words)

    def _variable(
        self, source: str, kernel: str, out: int, tiles: int, words: tuple[int, ...], size: int
    ) -> int:
        """Launch an encoder; the bytes it used, or 0 where ``size`` will hold them.

        ``tiles`` is 0 for no values: then there is no launch, and nobody else writes ``size``.
        """
        if not tiles:
            return 0
        work = self._launcher.zeros(2 + tiles)  # the size, the ticket, a word for each tile
        start = work.data_ptr()
        self._fixed(source, (), kernel, out, tiles, (*words, start + 8, size or start))
        if size:
            return 0
        nbytes = int(work[0])  # waits
        self.check()
        return nbytes


def _blockint(setting: int) -> tuple[str, ...]:
    """The macros of one setting: bits, + 16 rotated, + 32 with Gaussian levels."""
    rotate = ("HC_ROTATE=1",) if setting & 16 else ()
    gaussian = ("HC_GAUSSIAN=1",) if setting & 32 else ()
    return (f"HC_BITS={setting & 15}", *rotate, *gaussian)


class FusedBlockInt:
    """``codecs.base.Fused`` of blockint: three launches for an all_reduce, two for its half."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher = launcher
        self._defines = _blockint(setting)

    def encode(
        self, values: Tensor, chunk: int, slot: int, skip: int, out: Tensor,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A row of blocks for each chunk."""
        chunks = _ceil_div(values.numel(), chunk)
        rows = chunks - 1 if 0 <= skip < chunks else chunks
        words = (
            values.data_ptr(), values.numel(), chunk, slot, skip, out.data_ptr(), _code(values)
        )  # fmt: skip
        if residual is None:
            self._launch("encode", chunk, rows, *words)
        else:
            self._launch("encode_feedback", chunk, rows, *words, residual.data_ptr())

    def reduce(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Tensor | None = None, owner_residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A warp a tile: the sum stays in registers between decoding and encoding."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None and owner_residual is None:
            self._launch("reduce", own.numel(), 1, *words)
        else:
            left = (0 if r is None else r.data_ptr() for r in (residual, owner_residual))
            self._launch("reduce_feedback", own.numel(), 1, *words, *left)

    def sum(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A warp a tile."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None:
            self._launch("sum", own.numel(), 1, *words)
        else:
            self._launch("sum_feedback", own.numel(), 1, *words, residual.data_ptr())

    @staticmethod
    def _sum(payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor) -> tuple[int, ...]:
        """What the kernels that sum have in common."""
        slot = payloads.numel() // max(ranks - 1, 1)
        return (
            payloads.data_ptr(), own.data_ptr(), own.numel(), ranks, me, slot, out.data_ptr(),
            _code(own),
        )  # fmt: skip

    def decode(self, payloads: Tensor, chunk: int, slot: int, out: Tensor) -> None:
        """A row of blocks for each chunk."""
        rows = _ceil_div(out.numel(), chunk)
        words = (payloads.data_ptr(), out.numel(), chunk, slot, WHOLE, out.data_ptr())
        self._launch(f"decode_{DTYPES[_code(out)]}", chunk, rows, *words)

    def _launch(self, kernel: str, chunk: int, rows: int, *words: int) -> None:
        grid = (_ceil_div(chunk, 1024 * WARPS), rows)
        if grid[0] and grid[1]:
            self._launcher.launch("blockint.cu", self._defines, f"blockint_{kernel}", grid, *words)


def _code(values: Tensor) -> int:
    return (torch.float32, torch.bfloat16, torch.float16).index(values.dtype)


def _float_bits(value: float) -> int:
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word


class CupyLauncher:
    """Loads what ``images`` compiles, through CuPy, and launches on torch's current stream.

    All memory is torch's: a CUDA graph that captures the stream captures the launches.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            raise CodecError(
                f"codecs on a GPU need CuPy ({error}); install hybridcomp[gpu], or leave this "
                "dimension native"
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
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int], *words: int
    ) -> None:
        """See Launcher."""
        import numpy as np

        function = self._functions.get((source, defines, kernel))
        if function is None:
            function = self._load(source, defines, kernel)
        with self._stream():
            function(grid, (THREADS,), tuple(np.uint64(word) for word in words))

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
