"""Stand-in for a GPU: a ``.cu`` file's kernels, built for the emulator of ``emulator.h``."""

from __future__ import annotations

import ctypes
import fcntl
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import Codec
from hybridcomp.kernels.cuda import CudaKernels, images
from hybridcomp.kernels.cuda.launcher import Words
from tests.kernels.cuda.common import assert_same, kernels_replaced, results

HERE = Path(__file__).resolve().parent
CUDA, FORMATS = images.FOLDER, images.FORMATS
THREADS = 256
ARGUMENTS = 12
#: environment variable: lanes of a wave, for kernels as HIP compiles them
WAVE = "HYBRIDCOMP_EMULATED_WAVE"
#: flags of the CPU kernels: the same bytes with and without fused multiply-add. With -O1 expcode's
#: build takes 12 core seconds instead of 3, and its tests no longer
FLAGS = (
    "-std=c++17", "-O0", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared",
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
def _folder() -> Path:
    """Return a build folder shared by a test's ranks, and by sessions until a source changes."""
    digest = hashlib.sha256(images.sources_digest().encode())
    for path in sorted((HERE / "emulator.h", *HERE.glob("*.cu"))):
        digest.update(path.read_bytes())
    name = f"hybridcomp-emulated-{getpass.getuser()}-{digest.hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def emulated(source: str, *defines: str) -> Emulated:
    """Build ``hybridcomp/kernels/cuda/<source>``, or a source in this folder by its full path.

    ``defines``: macros (``NAME=VALUE``).
    """
    if wave := os.environ.get(WAVE):
        defines = (*defines, f"HC_WAVE={wave}")
    library = _folder() / f"{'-'.join((Path(source).name, *defines))}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of this session may be building it
        if not library.is_file():
            _build(source, defines, library)
    return Emulated(library)


def _build(source: str, defines: tuple[str, ...], library: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the CUDA kernels cannot be emulated")
    partial = library.with_suffix(f".{os.getpid()}")
    macros = [f"-D{define}" for define in defines]
    command = [compiler, *FLAGS, *macros, f"-I{FORMATS}", f"-I{CUDA}"]
    command += ["-o", str(partial), str(CUDA / source)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    partial.replace(library)


class EmulatedLauncher:
    """Launcher of ``cuda.CudaKernels`` for CPU tensors."""

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS, table: bytes | None = None,
    ) -> None:  # fmt: skip
        """See ``launcher.Launcher``. A single library has the kernels of all dtypes."""
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
