"""Stand-in for a GPU: a ``.cu`` file's kernels, built for the emulator of ``emulator.h``."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import BlockInt, Codec, make_codec
from hybridcomp.codecs.quantized_residual import Residual, as_fp32
from hybridcomp.collectives import Meter
from hybridcomp.kernels.cuda import CudaKernels, images
from hybridcomp.kernels.cuda.fused import blockint_macros
from hybridcomp.kernels.cuda.launcher import Words
from tests import built
from tests.kernels.cuda.common import assert_same, bits_but_nan, kernels_replaced, results

HERE = Path(__file__).resolve().parent
CUDA, FORMATS = images.FOLDER, images.FORMATS
THREADS = 256
ARGUMENTS = 12
#: environment variable: lanes of a wave, for kernels as HIP compiles them
WAVE = "HYBRIDCOMP_EMULATED_WAVE"
#: flags of the CPU kernels: the same bytes with and without fused multiply-add. With -O1 expcode's
#: build takes 12 core seconds instead of 3, and its tests no longer
FLAGS = (
    "-std=c++17", "-O0", "-ffp-contract=off", "-fno-trapping-math",
    "-Wno-unknown-pragmas", "-Wno-attributes", "-x", "c++", "-include", str(HERE / "emulator.h"),
)  # fmt: skip


class Emulated:
    """One compiled ``.cu`` file."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._run = self._library.emulate
        self._run.argtypes = [
            ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p,
            ctypes.c_uint64,
        ]  # fmt: skip
        self._seed = 1

    def launch(
        self, kernel: str, grid: tuple[int, int], *arguments: int, threads: int = THREADS,
        table: bytes | None = None,
    ) -> None:  # fmt: skip
        """Run ``kernel`` over ``grid`` blocks; the order of lanes differs at every call.

        A ``table`` is passed first, as an address.
        """
        held = None if table is None else ctypes.create_string_buffer(table, len(table))
        if held is not None:
            arguments = (ctypes.addressof(held), *arguments)
        pointer = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p)
        padded = [*arguments, *[0] * (ARGUMENTS - len(arguments))]
        words = (ctypes.c_uint64 * ARGUMENTS)(*(word % 2**64 for word in padded))
        self._seed += 1
        self._run(pointer, grid[0], grid[1], threads, ctypes.addressof(words), self._seed)


@cache
def _sources() -> bytes:
    """Return the digest of what a build may include."""
    digest = hashlib.sha256(images.sources_digest().encode())
    for path in sorted((HERE / "emulator.h", *HERE.glob("*.cu"))):
        digest.update(path.read_bytes())
    return digest.digest()


@cache
def emulated(source: str, *defines: str) -> Emulated:
    """Build ``hybridcomp/kernels/cuda/<source>``, or a source in this folder by its full path.

    ``defines``: macros (``NAME=VALUE``).
    """
    if built.compiler() is None:
        pytest.skip("no C++ compiler: the CUDA kernels cannot be emulated")
    if wave := os.environ.get(WAVE):
        defines = (*defines, f"HC_WAVE={wave}")
    macros = [f"-D{define}" for define in defines]
    arguments = [*FLAGS, *macros, f"-I{FORMATS}", f"-I{CUDA}", str(CUDA / source)]
    name = "-".join((Path(source).name, *defines))
    return Emulated(built.library(name, _sources(), arguments))


class EmulatedLauncher:
    """Launcher of ``cuda.CudaKernels`` for CPU tensors.

    Attributes:
        kernels: names of the launched kernels.
        tables: number of rows of each launch's table, and their address if they are elsewhere.
    """

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.tables: list[tuple[int, int]] = []

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS, table: bytes | None = None,
    ) -> None:  # fmt: skip
        """See ``launcher.Launcher``. A single library has the kernels of all dtypes."""
        assert grid[0] >= 1 and 1 <= grid[1] <= 65_535
        self.kernels.append(kernel)
        self.tables.append((0, 0) if table is None else struct.unpack_from("<2Q", table))
        macros = (define for define in defines if not define.startswith("HC_DTYPE="))
        emulated(source, *macros).launch(kernel, grid, *words, threads=threads, table=table)

    def zeros(self, words: int) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.zeros(words, dtype=torch.int64)

    def empty(self, words: int) -> Tensor:
        """See ``launcher.Launcher``; fills with garbage."""
        return torch.full((words,), -0x5A5A5A5A5A5A5A5B)

    def words(self, values: Words) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.from_numpy(values.copy())


KERNELS = CudaKernels(EmulatedLauncher())


def check(codec: Codec, values: Tensor) -> None:
    """Compare all results on ``KERNELS`` with the CPU's."""
    expected = results(codec, values)
    with kernels_replaced(KERNELS):
        found = results(codec, values)
    assert_same(codec, values, expected, found)
    KERNELS.check()


def blockint(settings: dict[str, Any]) -> BlockInt:
    """Return the codec with ``settings``."""
    codec = make_codec("blockint", **settings)
    assert isinstance(codec, BlockInt)
    return codec


def build_blockint(settings: dict[str, Any], *more: str, table: bool = True) -> None:
    """Build blockint's kernels before ranks, whose time is limited, need them.

    ``more``: macros; ``table``: also build the kernels of tables.
    """
    macros = blockint_macros(blockint(settings)._setting)
    for source in ("blockint.cu", "blockint_sum.cu", *["blockint_table.cu"] * table):
        emulated(source, *macros, *more)


Step = Callable[[int], Sequence[Residual]]
#: steps and results that differ, and the kernels launched in the last step without ``blockint_``
Compared = tuple[list[tuple[int, int]], list[str]]


def both_ways(begin: Callable[[], Step], steps: int = 2) -> Compared:
    """Take ``steps`` with the CPU's kernels, and again with emulated ones; compare the results.

    ``begin`` returns a function of the step's number that returns results, residuals and counts,
    which must be equal. NaNs are equal: the processor chooses which of two an addition keeps.
    """
    torch.set_num_threads(1)
    launcher, found = EmulatedLauncher(), list[list[Tensor]]()
    for kernels in (None, CudaKernels(launcher)):
        step = begin()
        for number in range(steps):
            launcher.kernels.clear()
            with kernels_replaced(kernels) if kernels else nullcontext():
                results = step(number)
            found.append([_bits(each) for each in results])
    different = [
        (number, index)
        for number in range(steps)
        for index, pair in enumerate(zip(found[number], found[steps + number], strict=True))
        if not torch.equal(*pair)
    ]
    return different, [kernel.removeprefix("blockint_") for kernel in launcher.kernels]


def _bits(result: Residual) -> Tensor:
    values = as_fp32(result)
    return bits_but_nan(values).clone() if values.is_floating_point() else values.clone()


def names_of(kernels: list[str]) -> list[str]:
    """Return kernels without the dtype, the last word of their names."""
    return [kernel.rpartition("_")[0] for kernel in kernels]


def count_of(meter: Meter) -> Tensor:
    """Return a meter's messages and bytes, as results to compare."""
    return torch.tensor([meter.messages, meter.wire_nbytes])
