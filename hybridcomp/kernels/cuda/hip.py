"""Support AMD GPUs (untested): device names, libraries, and images compiled by hipRTC.

Our kernels have never run on such a GPU. torch for ROCm names AMD's GPUs and streams ``cuda``, and
RCCL ``nccl``. In CuPy for ROCm, the NVRTC binding calls hipRTC, and the CUDA binding calls AMD's
runtime. ``launch.cpp`` launches kernels by the functions of either driver.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridcomp.errors import CodecError

NEVER_RUN = (
    "codecs were never run on an AMD GPU: their kernels were compiled for some and emulated, no "
    "more; compare losses with native communication first, and tell us"
)
#: hipRTC's options for all kernels: no implicit fused multiply-add, no flushing of subnormals
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-gpu-flush-denormals-to-zero")
#: architecture to compile for if there is no GPU: waves of 64 lanes
EXAMPLE = "gfx90a"


def version() -> tuple[int, int] | None:
    """Return the version of ROCm that torch is built for, or None for another build."""
    return version_of(torch.version.hip)


def version_of(text: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version, or None for None."""
    if text is None:
        return None
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor)


def target(index: int) -> str:
    """Return the name of a device for AMD's compilers, such as ``gfx90a:sramecc+:xnack-``."""
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.gcnArchName)


def library() -> str:
    """Return the name of AMD's runtime library, which torch has loaded."""
    found = version()
    return "libamdhip64.so" if found is None else f"libamdhip64.so.{found[0]}"


def install() -> str:
    """Return how to install a CuPy that fits torch."""
    found = version()
    if found is not None and found[0] == 7:
        return "pip install cupy-rocm-7-0"
    text = "ROCm" if found is None else f"ROCm {found[0]}.{found[1]}"
    return f"install CuPy for {text} (https://docs.cupy.dev/en/stable/install.html)"


def compiled(
    compiler: Any, text: str, source: str, target: str, options: tuple[str, ...]
) -> tuple[bytes, str]:
    """Compile ``text``, named ``source``, for ``target`` with ``compiler``, CuPy's binding.

    Returns the code object and the compiler's log. Raises CodecError with that log.
    """
    program = compiler.createProgram(text, source, [], [])
    try:
        compiler.compileProgram(program, (*OPTIONS, f"--offload-arch={target}", *options))
        log: str = compiler.getProgramLog(program)
        # CuPy drops the last byte of the image, taking it for the terminating zero of a text
        return compiler.getPTX(program) + b"\0", log
    except compiler.NVRTCError as error:
        raise CodecError(
            f"hipRTC {compiler.getVersion()} cannot compile {source} for {target} ({error}):\n"
            f"{compiler.getProgramLog(program)}"
        ) from error
    finally:
        compiler.destroyProgram(program)
