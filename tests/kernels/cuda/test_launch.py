"""launch.cpp against a stand-in for libcuda that records its calls."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import launcher
from hybridcomp.kernels.cuda.workspaces import SLAB, Workspaces
from tests import built

HERE = Path(__file__).resolve().parent
CONTEXT = 0x77  # the stand-in's


def own_extension(folder: Path) -> Any:
    """Copy the extension: other tests' instance keeps its driver."""
    found = importlib.util.find_spec("hybridcomp.kernels._launch")
    assert found is not None and found.origin is not None, "the extension is not built"
    copied = Path(shutil.copy(found.origin, folder))
    spec = importlib.util.spec_from_file_location("_launch", copied)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Driver:
    """The extension, with the stand-in open."""

    def __init__(self, library: Path) -> None:
        self.extension = own_extension(library.parent)
        self.extension.open_driver(str(library))
        self.library = ctypes.CDLL(str(library))

    def expect(self, words: int, table_words: int = 0, fails: int = 0) -> None:
        """Set what the next launch must have."""
        for name, value in (("words", words), ("table_words", table_words), ("fails", fails)):
            ctypes.c_int.in_dll(self.library, name).value = value

    def seen(self, count: int) -> list[int]:
        """Return function, grid, block, shared memory, stream, context, ``extra``, arguments."""
        return list((ctypes.c_uint64 * 24).in_dll(self.library, "seen"))[:count]


def fake_driver(folder: Path, *flags: str) -> Driver:
    """Load the extension with a fake driver."""
    if built.compiler() is None:
        pytest.skip("no C++ compiler")
    source = HERE / "fake_driver.cpp"
    # one of several libraries with global symbols
    arguments = ["-Wl,-Bsymbolic", *flags, str(source)]
    library = built.library("driver", source.read_bytes(), arguments)
    return Driver(Path(shutil.copy(library, folder)))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """NVIDIA's driver."""
    return fake_driver(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture(scope="module")
def hip_driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """AMD's driver: its device takes the context's place."""
    return fake_driver(tmp_path_factory.mktemp("libamdhip"), "-DHIP")


def test_a_launch_hands_over_words(driver: Driver) -> None:
    driver.expect(3)
    driver.extension.launch(2**40, CONTEXT, 5, 2, 64, 9, None, 2**64 - 1, 0, 7)
    assert driver.seen(14) == [2**40, 5, 2, 1, 64, 1, 1, 0, 9, CONTEXT, 0, 2**64 - 1, 0, 7]


def test_a_table_is_the_first_argument(driver: Driver) -> None:
    driver.expect(1, table_words=2)
    driver.extension.launch(1, CONTEXT, 1, 1, 256, 0, struct.pack("2Q", 3, 2**63), 8)
    assert driver.seen(14)[11:] == [3, 2**63, 8]


def test_another_context_is_pushed_for_the_launch_only(driver: Driver) -> None:
    """A thread that has not used the device has no context."""
    driver.expect(0)
    driver.extension.launch(1, 0x55, 1, 1, 256, 0, None)
    assert driver.seen(10)[9] == 0x55
    assert driver.extension.current_context() == CONTEXT


def test_what_the_driver_says_is_told(driver: Driver) -> None:
    driver.expect(0, fails=1)
    with pytest.raises(RuntimeError, match=r"launch of a kernel: CUDA error 1 \(made up\)"):
        driver.extension.launch(1, 0x55, 1, 1, 256, 0, None)
    assert driver.extension.current_context() == CONTEXT
    driver.expect(0, fails=700)
    with pytest.raises(RuntimeError, match=r"CUDA error 700 \(unknown\)"):
        driver.extension.launch(1, CONTEXT, 1, 1, 256, 0, None)


def test_a_launch_on_another_device_of_amds_leaves_the_current_one(hip_driver: Driver) -> None:
    """CUDA's launch arguments, with a device in place of the context."""
    extension = hip_driver.extension
    assert extension.current_context() == 1
    hip_driver.expect(1, table_words=2)
    extension.launch(2**40, 0, 5, 2, 64, 9, struct.pack("2Q", 3, 2**63), 7)
    assert hip_driver.seen(14) == [2**40, 5, 2, 1, 64, 1, 1, 0, 9, 0, 0, 3, 2**63, 7]
    assert extension.current_context() == 1
    hip_driver.expect(0, fails=98)
    with pytest.raises(RuntimeError, match=r"launch of a kernel: HIP error 98 \(made up\)"):
        extension.launch(1, 1, 1, 1, 256, 0, None)
    hip_driver.expect(0)
    with pytest.raises(RuntimeError, match=r"HIP error 101 \(made up\)"):  # no such device
        extension.launch(1, 7, 1, 1, 256, 0, None)
    assert extension.current_context() == 1


def test_a_library_that_is_no_driver(driver: Driver) -> None:
    """The error names the missing function, and the open driver stays."""
    library = built.library("empty", b"", ["-x", "c++", "/dev/null"])
    with pytest.raises(OSError, match="cuLaunchKernel"):
        driver.extension.open_driver(str(library))
    assert driver.extension.current_context() == CONTEXT


def test_wrong_arguments(driver: Driver) -> None:
    driver.expect(0)
    for wrong in ((1, 2, 3), (1, CONTEXT, 1, 1, 256, 0, None, *range(25)),
                  (1, CONTEXT, 1, 1, 256, 0, 5), (1, CONTEXT, -1, 1, 256, 0, None),
                  (1, CONTEXT, 1, 1, 256, 0, None, "word")):  # fmt: skip
        with pytest.raises((TypeError, OverflowError)):
            driver.extension.launch(*wrong)


def test_a_machine_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension, missing = own_extension(tmp_path), str(tmp_path / "libcuda.so")
    with pytest.raises(OSError, match="libcuda"):
        extension.open_driver(missing)
    with pytest.raises(RuntimeError, match="no driver is open"):
        extension.launch(1, 2, 1, 1, 256, 0, None)
    monkeypatch.setattr(launcher, "LIBCUDA", missing)
    monkeypatch.setattr(importlib, "import_module", lambda name: extension)
    with pytest.raises(CodecError, match="no CUDA driver was found"):
        launcher._extension.__wrapped__()


def test_words_are_zero_once_and_never_shared() -> None:
    made: list[torch.Tensor] = []

    def make(words: int) -> torch.Tensor:
        made.append(torch.zeros(words, dtype=torch.int64))
        return made[-1]

    spaces = Workspaces(make)
    taken: list[torch.Tensor] = []
    for step in range(200):
        for stream in (0, 7):
            words = spaces.take(1 + step * 11, stream)
            assert words.numel() == 1 + step * 11 and not words.any()
            words.fill_(1 + len(taken))
            taken.append(words)
    for number, words in enumerate(taken):
        assert bool((words == 1 + number).all())
    assert 2 * 3 < len(made) < 20 and {slab.numel() for slab in made} == {SLAB}
    assert spaces.take(SLAB, 0).numel() == SLAB and len(made[-1]) == SLAB
