"""The CUDA back end: what is launched, with which grid, over which arguments.

The kernels are the ``.cu`` files beside this one, around the headers that the CPU uses; their bytes
are the CPU's. :class:`CudaKernels` does not know how a kernel is started: a ``launcher.Launcher``
does. ``CudaLauncher`` loads images that NVRTC compiles and launches on torch's current stream; the
tests have one that runs the same sources on the host. ``fused`` has the kernels for all chunks
of a reduction at once.

Nothing here waits for the device, except encoders of variable size that are asked to return it;
those that are given the address of a word leave the size there.
"""

from __future__ import annotations

import struct
from functools import cached_property

from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda.fused import FusedBlockInt, blockint_image
from hybridcomp.kernels.cuda.launcher import DTYPES, THREADS, WARPS, WHOLE, Launcher, ceil_div
from hybridcomp.kernels.cuda.table import EachBlockInt
from hybridcomp.kernels.late_read import LateRead

FORMATS = ("e4m3", "e5m2")
ALIGN = 16
#: of a block of threads of expcode.cu, by dtype code: each has a tile in shared memory
EXPCODE_ENCODE_WARPS = (4, 8, 8)
EXPCODE_DECODE_WARPS = (4, 2, 2)


class CudaKernels:
    """The functions of ``kernels.Kernels`` on a device; arguments are described there.

    Raises ValueError for a payload that does not begin at a multiple of 16 bytes.
    """

    STORES_SIZES = True  # kernels.stores_sizes

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._late = LateRead()

    @cached_property
    def _damage(self) -> Tensor:
        """Set by decoders that met a payload which no encoder made."""
        return self._launcher.zeros(1)

    def check(self) -> None:
        """Wait for the device; raise CodecError if a payload was damaged since the last check."""
        if int(self._damage):
            self._damage.zero_()
            raise CodecError(
                "a payload decoded on the GPU since the last check is damaged, and so is what this "
                "rank computed from it; go on from the last checkpoint"
            )

    def poll(self) -> None:
        """Raise as ``check`` does, by what the call before asked for; waits for nothing."""
        found = self._late.take()
        if found is not None and int(found):
            self.check()  # which may have told of it already
        if not self._late.pending:
            self._late.start(self._damage)

    def blockint_encode(
        self, setting: int, dtype: int, values: int, numel: int, out: int, nbytes: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """One warp a tile of 1024 values."""
        self._fixed(
            "blockint.cu", blockint_image(setting, dtype), f"blockint_encode_{DTYPES[dtype]}", out,
            ceil_div(numel, 1024 * WARPS), (values, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def blockint_decode(
        self, setting: int, dtype: int, payload: int, nbytes: int, out: int, numel: int,
        add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """One warp a tile."""
        self._fixed(
            "blockint.cu", blockint_image(setting, 0 if add else dtype),
            "blockint_add" if add else f"blockint_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, 1024 * WARPS), (payload, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def blockint_fused(self, setting: int) -> FusedBlockInt:
        """Kernels for all chunks of an all_reduce."""
        return FusedBlockInt(self._launcher, setting)

    def blockint_each(self, setting: int) -> EachBlockInt:
        """Kernels for several tensors with a payload each."""
        return EachBlockInt(self._launcher, setting)

    def fp8_encode(
        self, form: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int, /
    ) -> None:
        """256 threads a block of 4096 values."""
        self._fixed(
            "casts.cu", (), f"fp8_{FORMATS[form]}_encode_{DTYPES[dtype]}", out,
            ceil_div(numel, 4096), (values, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def fp8_decode(
        self, form: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """256 threads a block."""
        name = f"fp8_{FORMATS[form]}_" + ("add" if add else f"decode_{DTYPES[dtype]}")
        self._fixed(
            "casts.cu", (), name, payload, ceil_div(numel, 4096),
            (payload, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def zfp_encode(
        self, maxbits: int, dtype: int, values: int, numel: int, out: int, nbytes: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """A thread four blocks of 4 values."""
        self._fixed(
            "zfp.cu", (), f"zfp_encode_{DTYPES[dtype]}", out, ceil_div(numel, 16 * THREADS),
            (values, numel, numel, 0, WHOLE, maxbits, out),
        )  # fmt: skip

    def zfp_decode(
        self, maxbits: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """A thread four blocks."""
        self._fixed(
            "zfp.cu", (), "zfp_add" if add else f"zfp_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, 16 * THREADS), (payload, numel, numel, 0, WHOLE, maxbits, out),
        )  # fmt: skip

    def cast(
        self, source: int, to: int, values: int, out: int, numel: int, add: bool, threads: int, /
    ) -> None:
        """Eight values a thread. Between equal dtypes 32 bytes move, NaN payloads included."""
        name, count, each = f"cast_{DTYPES[source]}_{DTYPES[to]}", numel, 8
        if add:
            name = f"add_{DTYPES[source]}"
        elif source == to:
            name, count, each = "cast_copy", numel * (4 if source == 0 else 2), 32
        if numel:
            grid = (ceil_div(count, each * THREADS), 1)
            self._launcher.launch("casts.cu", (), name, grid, values, count, out)

    def mpc_encode(
        self, dim: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """A warp a chunk of 1024 words."""
        words = numel if dtype == 0 else ceil_div(numel, 2)
        tiles = ceil_div(words, 1024 * WARPS)
        arguments = (values, numel, dim, dtype, out)
        return self._variable("mpc.cu", "mpc_encode", out, tiles, arguments, size)

    def mpc_decode(
        self, dim: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Damage is told by ``check``."""
        words = numel if dtype == 0 else ceil_div(numel, 2)
        tiles = ceil_div(words, 1024 * WARPS)
        work = self._launcher.zeros(1 + tiles)
        self._fixed(
            "mpc.cu", (), "mpc_add" if add else "mpc_decode", payload, tiles,
            (payload, nbytes, numel, dim, dtype, out, work.data_ptr(), self._damage.data_ptr()),
        )  # fmt: skip

    def radix_encode(
        self, segment: int, relative: bool, bound: float, dtype: int, values: int, numel: int,
        out: int, nbytes: int, threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """Two segments a block of threads, which look back together."""
        words = (values, numel, segment, _float_bits(bound), int(relative), dtype, out)
        tiles = ceil_div(numel, 2 * segment)
        return self._variable("radix.cu", f"radix_encode_{DTYPES[dtype]}", out, tiles, words, size)

    def radix_decode(
        self, segment: int, relative: bool, bound: float, dtype: int, payload: int, nbytes: int,
        out: int, numel: int, add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """16-bit values take half as many threads a segment. Damage is told by ``check``."""
        self._fixed(
            "radix.cu", (), "radix_add" if add else f"radix_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, segment),
            (payload, nbytes, numel, segment, _float_bits(bound), int(relative), out,
             self._damage.data_ptr()),
            threads=256 if add or dtype == 0 else 128,
        )  # fmt: skip

    def expcode_encode(
        self, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """A warp a tile of 2048 values."""
        kernel, words = f"expcode_encode_{DTYPES[dtype]}", (values, numel, dtype, out)
        warps = EXPCODE_ENCODE_WARPS[dtype]
        groups = ceil_div(numel, 2048 * warps)
        return self._variable("expcode.cu", kernel, out, groups, words, size, 32 * warps)

    def expcode_decode(
        self, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """A warp a tile. Damage is told by ``check``."""
        warps = EXPCODE_DECODE_WARPS[dtype]
        self._fixed(
            "expcode.cu", (), f"expcode_{'add' if add else 'decode'}_{DTYPES[dtype]}", payload,
            ceil_div(numel, 2048 * warps),
            (payload, nbytes, numel, dtype, out, self._damage.data_ptr()), 32 * warps,
        )  # fmt: skip

    def _fixed(
        self, source: str, defines: tuple[str, ...], kernel: str, payload: int, blocks: int,
        words: tuple[int, ...], threads: int = THREADS,
    ) -> None:  # fmt: skip
        if payload % ALIGN:
            raise ValueError(f"{kernel}: the payload must begin at a multiple of {ALIGN} bytes")
        if blocks:
            self._launcher.launch(source, defines, kernel, (blocks, 1), *words, threads=threads)

    def _variable(
        self, source: str, kernel: str, out: int, tiles: int, words: tuple[int, ...], size: int,
        threads: int = THREADS,
    ) -> int:  # fmt: skip
        """Launch an encoder; the bytes it used, or 0 where ``size`` will hold them.

        ``tiles`` is 0 for no values: then there is no launch, and nobody else writes ``size``.
        """
        if not tiles:
            return 0
        work = self._launcher.zeros(2 + tiles)  # the size, the ticket, a word for each tile
        start = work.data_ptr()
        self._fixed(source, (), kernel, out, tiles, (*words, start + 8, size or start), threads)
        if size:
            return 0
        nbytes = int(work[0])  # waits
        self.check()
        return nbytes


def _float_bits(value: float) -> int:
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word
