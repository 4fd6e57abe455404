"""Stand-in for CUDA: built once, loaded before torch is imported."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests import built

SOURCE = Path(__file__).resolve().parent / "device.cpp"
#: environment variables: whether a process uses the stand-in, and its devices
ASKED, DEVICES = "HYBRIDCOMP_NCCL_DEVICE", "HC_DEVICES"
#: the value that enables it
STAND_IN = "stand-in"
#: devices of a process, and the one each rank uses: not the first, the default of unnamed devices
COUNT, INDEX = 2, 1
#: module that starts the stand-in when imported
PRELOAD = "tests.stand_ins.cuda.preload"


def is_asked() -> bool:
    """Return whether this process uses the stand-in."""
    return os.environ.get(ASKED) == STAND_IN


def why_not() -> str:
    """Return what the stand-in lacks here; "": nothing."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed"
    if (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "torch is built with CUDA: the tests marked gpu are for it"
    return "" if built.compiler() else "no C++ compiler"


def begin() -> None:
    """Provide CUDA devices and NCCL in this process from now on; call before importing torch."""
    assert "torch" not in sys.modules, "torch has looked for GPUs when it was imported"
    os.environ.setdefault(DEVICES, str(COUNT))
    root = _torch()
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()))
    from tests.stand_ins.cuda import attention, kernels, nccl, surface

    surface.place()
    attention.place()
    nccl.place()
    kernels.place(int(os.environ[DEVICES]))


def take_device() -> None:
    """Run this rank's tests, which are written for CPUs, on its device."""
    import torch

    from tests.stand_ins.cuda import elsewhere

    os.environ["LOCAL_RANK"] = str(INDEX)
    torch.cuda.set_device(INDEX)
    elsewhere.place()


def library() -> Path:
    """Build the library if needed; all ranks of this user and torch share it."""
    include, root = _torch() / "include", _torch() / "lib"
    arguments = [
        "-std=c++20", "-O1", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        str(SOURCE), f"-L{root}", "-lc10", "-ltorch_cpu", "-ltorch",
    ]  # fmt: skip
    return built.library("device", SOURCE.read_bytes() + version("torch").encode(), arguments)


def _torch() -> Path:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
