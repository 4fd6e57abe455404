"""Kernels: one portable header per codec, and a loader for what was compiled around it.

``<codec>.h`` encodes and decodes blocks, on a host and on a device. ``cpu*.cpp`` loop over it and
are built at install into ``hybridcomp.kernels._cpu``; ``*.cu`` spread it over a grid and are
compiled at first use (``cuda.py``). A back end is a set of functions on raw pointers, described by
:class:`Kernels`; codecs ask :func:`kernels_of` for the one of their tensors.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Protocol, cast

import torch

from hybridcomp.errors import CodecError, ConfigError

#: dtype codes of the kernels (kernels/cpu/cpu.h, Dtype)
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: must equal VERSION in ``cpu.cpp``; both grow with every change of a function or a format, so that
#: an extension left over from older sources is told by name
VERSION = 2


class FixedEncode(Protocol):
    """Writes the payload of ``numel`` values at ``values`` into ``nbytes`` bytes at ``out``."""

    def __call__(
        self,
        setting: int,
        dtype: int,
        values: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        /,
    ) -> None: ...


class FixedDecode(Protocol):
    """Reads ``numel`` values from ``nbytes`` bytes at ``payload`` into ``out``."""

    def __call__(
        self,
        setting: int,
        dtype: int,
        payload: int,
        nbytes: int,
        out: int,
        numel: int,
        add: bool,
        threads: int,
        /,
    ) -> None: ...


class Kernels(Protocol):
    """One back end. Addresses come from ``Tensor.data_ptr``; dtypes are DTYPE_CODES.

    ``add`` accumulates into fp32 instead of writing; the dtype of ``out`` is then fp32. Functions
    raise ValueError when a buffer is too short or an argument is out of range.

    Encoders of variable size return the bytes used. Where ``stores_sizes`` they take the address
    of an int64 as ``size``: they leave the bytes there, wait for nothing, and return 0.
    """

    @property
    def blockint_encode(self) -> FixedEncode:
        """Setting: bits, + 16 rotated, + 32 with Gaussian levels."""

    @property
    def blockint_decode(self) -> FixedDecode:
        """Setting: bits, + 16 rotated, + 32 with Gaussian levels."""

    @property
    def fp8_encode(self) -> FixedEncode:
        """Setting: 0 e4m3, 1 e5m2."""

    @property
    def fp8_decode(self) -> FixedDecode:
        """Setting: 0 e4m3, 1 e5m2."""

    @property
    def zfp_encode(self) -> FixedEncode:
        """Setting: bits of a block of 4 values."""

    @property
    def zfp_decode(self) -> FixedDecode:
        """Setting: bits of a block of 4 values."""

    def cast(
        self, source: int, to: int, values: int, out: int, numel: int, add: bool, threads: int, /
    ) -> None:
        """Convert between dtypes, saturating; ``source`` and ``to`` are dtype codes."""

    def mpc_encode(
        self,
        dim: int,
        dtype: int,
        values: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        size: int = 0,
        /,
    ) -> int:
        """``nbytes`` is the worst case."""

    def mpc_decode(
        self,
        dim: int,
        dtype: int,
        payload: int,
        nbytes: int,
        out: int,
        numel: int,
        add: bool,
        threads: int,
        /,
    ) -> None:
        """``dtype`` is the encoded one, also when ``add`` accumulates into fp32."""

    def radix_encode(
        self,
        segment: int,
        relative: bool,
        bound: float,
        dtype: int,
        values: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        size: int = 0,
        /,
    ) -> int:
        """``nbytes`` is the worst case. ``bound`` is a float32."""

    def radix_decode(
        self,
        segment: int,
        relative: bool,
        bound: float,
        dtype: int,
        payload: int,
        nbytes: int,
        out: int,
        numel: int,
        add: bool,
        threads: int,
        /,
    ) -> None:
        """``dtype`` is that of ``out``; the payload says which one was encoded."""

    def expcode_encode(
        self,
        dtype: int,
        values: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        size: int = 0,
        /,
    ) -> int:
        """``nbytes`` is the worst case."""

    def expcode_decode(
        self,
        dtype: int,
        payload: int,
        nbytes: int,
        out: int,
        numel: int,
        add: bool,
        threads: int,
        /,
    ) -> None:
        """``dtype`` is the encoded one, also when ``add`` accumulates into fp32."""


class DeviceKernels(Kernels, Protocol):
    """A back end whose decoders tell later of a damaged payload, as nobody waits for them."""

    def check(self) -> None:
        """Raise CodecError if one was met since the last check; waits for the device."""

    def poll(self) -> None:
        """Raise CodecError if one had been met by the call before; waits for nothing."""


@lru_cache(maxsize=1)
def _cpu_kernels() -> Kernels:
    try:
        module = importlib.import_module("hybridcomp.kernels._cpu")
    except ImportError as error:
        raise CodecError(
            f"the CPU kernels are not built ({error}); build them with `pip install .`, or with "
            "`pip install --no-build-isolation -e .` in a checkout (needs a C++17 compiler)"
        ) from error
    found = getattr(module, "VERSION", 1)
    if found != VERSION:
        raise CodecError(
            f"the CPU kernels were built from other sources: expected version {VERSION}, found "
            f"{found}; build them again with `pip install .`, or with "
            "`pip install --no-build-isolation -e .` in a checkout"
        )
    return cast(Kernels, module)


#: by index of the device, once a codec has run there
_on_cuda: dict[int, DeviceKernels] = {}


def _cuda_kernels(index: int) -> Kernels:
    if index not in _on_cuda:
        from hybridcomp.kernels.cuda import CudaKernels
        from hybridcomp.kernels.cuda.launcher import CudaLauncher

        _on_cuda[index] = CudaKernels(CudaLauncher(torch.device("cuda", index)))
    return _on_cuda[index]


def check_payloads() -> None:
    """Raise CodecError if a GPU met a damaged payload since the last check; waits for the GPUs.

    Decoders on a CPU raise at once; on a GPU that would make every message wait for the host.
    """
    for kernels in _on_cuda.values():
        kernels.check()


def require_kernels(device: torch.device) -> None:
    """Load what codecs need on ``device``, before training instead of at the first message.

    Raises ConfigError in one line: the extension is not built, CuPy or its compiler is missing.
    """
    try:
        kernels_of(device)
        if device.type == "cuda":
            from hybridcomp.kernels.cuda import images

            images.compiler()
    except CodecError as error:
        found = f"codecs for messages on {device}, which cannot run there"
        raise ConfigError("compression", found, str(error)) from None


def poll_payloads() -> None:
    """Raise CodecError if a GPU had met a damaged payload by the call before; waits for nothing."""
    for kernels in _on_cuda.values():
        kernels.poll()


def stores_sizes(kernels: Kernels) -> bool:
    """Whether encoders take the address of a word for the size, and wait for nothing."""
    return bool(getattr(kernels, "STORES_SIZES", False))


def kernels_of(device: torch.device) -> Kernels:
    """The back end for tensors on ``device``.

    Raises:
        CodecError: the device has no back end, CuPy is missing, or the extension was not built.
    """
    if device.type == "cpu":
        return _cpu_kernels()
    if device.type == "cuda":
        return _cuda_kernels(torch.cuda.current_device() if device.index is None else device.index)
    raise CodecError(
        f"no codec kernels for device {str(device)!r}: expected cpu or cuda; move the tensor there "
        "or leave this dimension native"
    )
