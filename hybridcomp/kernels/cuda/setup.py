"""Report the versions of driver, torch, CuPy and its compiler, and whether they fit together.

No function starts a kernel or creates a context on a device; any fact may be missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from hybridcomp.errors import CodecError, install_hint
from hybridcomp.kernels.cuda import hip

Version = tuple[int, int]
#: lowest compute capability that the compiler of CUDA 13 supports (a V100 has 7.0)
FIRST_OF_CUDA_13 = 75
#: packages that contain CuPy, with the CUDA version of each
CUPY = {"cupy-cuda11x": 11, "cupy-cuda12x": 12, "cupy-cuda13x": 13}
#: packages for AMD's GPUs, with the ROCm version of each
CUPY_ROCM = {"cupy-rocm-5-0": 5, "cupy-rocm-7-0": 7}


@dataclass(frozen=True)
class CudaSetup:
    """CUDA versions of this process; an attribute that is None or empty is missing.

    Attributes:
        driver: newest CUDA version that the driver supports.
        torch, rocm: CUDA or ROCm version of torch's build.
        devices: name and compute capability (90 for 9.0; AMD: target name) of torch's GPUs.
        cupy: installed packages that contain CuPy, with versions.
        nvrtc, architectures: compiler that CuPy loads (AMD: hipRTC), and its targets.
        problem: why the compiler could not be loaded.
    """

    driver: Version | None = None
    torch: Version | None = None
    rocm: Version | None = None
    devices: tuple[tuple[str, int | str], ...] = ()
    cupy: tuple[tuple[str, str], ...] = ()
    nvrtc: Version | None = None
    architectures: tuple[int, ...] = ()
    problem: str = ""


def setup() -> CudaSetup:
    """Collect the CUDA versions of this process. Never raises if one is missing."""
    nvrtc, architectures, problem = _nvrtc()
    return CudaSetup(
        driver=_driver(), torch=hip.version_of(torch.version.cuda), rocm=hip.version(),
        devices=_devices(),
        cupy=tuple(
            (name, found) for name in (*CUPY, *CUPY_ROCM, "cupy") if (found := _installed(name))
        ),
        nvrtc=nvrtc, architectures=architectures, problem=problem,
    )  # fmt: skip


def extra_of(found: CudaSetup) -> str:
    """Return the extra of hybridcomp that fits: ``cuda12`` or ``cuda13``.

    A GPU that CUDA 13 no longer supports (V100) needs ``cuda12``. Otherwise the major version of
    torch's CUDA decides, since its libraries are installed; without one, the driver's.
    """
    if any(architecture < FIRST_OF_CUDA_13 for _, architecture in _of_nvidia(found)):
        return "cuda12"
    for version in (found.torch, found.driver):
        if version is not None:
            return "cuda12" if version[0] < 13 else "cuda13"
    return "cuda13"


def install_of(found: CudaSetup) -> str:
    """Return how to install a CuPy that fits the GPUs and torch."""
    return hip.install() if found.rocm else install_hint(extra_of(found))


def _of_nvidia(found: CudaSetup) -> Iterator[tuple[str, int]]:
    for name, architecture in found.devices:
        if isinstance(architecture, int):
            yield name, architecture


def misfits(found: CudaSetup) -> Iterator[str]:
    """Yield a sentence for every reason why codecs cannot run on the GPUs of this machine."""
    if not found.devices:
        return
    install = install_of(found)
    if len(found.cupy) > 1:
        names = ", ".join(name for name, _ in found.cupy)
        yield (
            f"several packages hold CuPy ({names}), which overwrite each other's files: "
            f"pip uninstall {names.replace(',', '')}, then {install}"
        )
    elif not found.cupy:
        yield f"codecs on a GPU need CuPy, which is not installed: {install}"
    elif found.nvrtc is None:
        compiler = "hipRTC" if found.rocm else "NVRTC"
        yield f"CuPy does not find the compiler {compiler} ({found.problem}): {install}"
    elif found.rocm and found.cupy[0][0] in CUPY:
        yield f"torch is built for ROCm, and {found.cupy[0][0]} for CUDA: {install}"
    if found.nvrtc is None or found.rocm:
        return
    yield from _of_the_driver(found, install)
    for name, architecture in _of_nvidia(found):
        if architecture < min(found.architectures):
            yield (
                f"NVRTC {_text(found.nvrtc)} compiles for sm_{min(found.architectures)} and newer, "
                f"and {name} is sm_{architecture}: {install}"
            )


def _of_the_driver(found: CudaSetup, install: str) -> Iterator[str]:
    if found.driver is None or found.nvrtc is None or found.nvrtc[0] <= found.driver[0]:
        return
    # within a major version older drivers run newer images (CUDA's minor version compatibility)
    yield (
        f"the driver runs CUDA up to {_text(found.driver)}, and kernels would be compiled by "
        f"NVRTC {_text(found.nvrtc)}: {install}, or a newer driver"
    )


def lines(found: CudaSetup) -> Iterator[str]:
    """Describe the CUDA setup in sentences, without judging it."""
    for index, (name, architecture) in enumerate(found.devices):
        yield f"GPU {index}: {name}, {'' if found.rocm else 'sm_'}{architecture}"
    if found.driver is not None:
        yield f"the NVIDIA driver runs CUDA up to {_text(found.driver)}"
    if found.rocm is not None:
        yield f"torch is built for ROCm {_text(found.rocm)}: {hip.NEVER_RUN}"
    elif found.torch is None:
        yield "torch is a build without CUDA"
    else:
        yield f"torch is built for CUDA {_text(found.torch)}"
    for name, version in found.cupy:
        yield f"{name} {version}"
    if found.nvrtc is not None and found.rocm:
        yield f"hipRTC {_text(found.nvrtc)}"
    elif found.nvrtc is not None:
        oldest = min(found.architectures)
        yield f"NVRTC {_text(found.nvrtc)} compiles for sm_{oldest} and newer"


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _driver() -> Version | None:
    """Read the driver's version from libcuda; asking torch would initialize a device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _devices() -> tuple[tuple[str, int | str], ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        number = 10 * device.major + device.minor
        found.append((device.name, hip.target(index) if hip.version() else number))
    return tuple(found)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc() -> tuple[Version | None, tuple[int, ...], str]:
    """Return version and architectures of the compiler, or why it cannot be loaded."""
    from hybridcomp.kernels.cuda import images

    try:
        version, architectures = images.compiler()
    except CodecError as error:
        return None, (), str(error)
    return version, architectures, ""
