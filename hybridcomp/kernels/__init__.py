"""Kernels: one portable header per codec, and the loader of the compiled kernels around it.

``formats/<codec>.h`` encodes and decodes a block, on a host or a device. ``cpu/*.cpp`` loop over
the blocks and are built at install into ``hybridcomp.kernels._cpu``, with a module of functions for
each codec. ``cuda/*.cu`` spread the blocks over a grid and are compiled at first use;
``cuda/<codec>.py`` launches them. There is no list of codecs: each codec has a :class:`KernelSet`,
typed by the arguments of its functions, which returns the functions for a tensor's device.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from hybridcomp.errors import CodecError, ConfigError

#: dtype codes of the kernels (kernels/cpu/cpu.h, Dtype)
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: must equal VERSION in ``cpu.cpp``. Increase both numbers with every change of a function or a
#: format, so that an outdated extension is detected; a new codec needs no increase, as an outdated
#: extension lacks its functions
VERSION = 5
#: advice to a user whose extension is missing or old
BUILD = "`pip install .`, or with `pip install --no-build-isolation -e .` in a checkout"


class FixedKernels(Protocol):
    """Kernels of a codec with fixed payload size and one setting, on every back end.

    Addresses are ``Tensor.data_ptr()``, dtypes are DTYPE_CODES. Functions of all codecs raise
    ValueError when a buffer is too short or an argument is out of range.
    """

    def encode(
        self,
        setting: int,
        dtype: int,
        values: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        /,
    ) -> None:
        """Write the payload of ``numel`` values at ``values`` into ``nbytes`` bytes at ``out``."""

    def decode(
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
    ) -> None:
        """Read ``numel`` values from ``nbytes`` bytes at ``payload`` into ``out``.

        ``add`` accumulates into fp32 instead of writing; the dtype of ``out`` is then fp32.
        """


class VariableKernels(Protocol):
    """Kernels of a codec with variable payload size, on every back end.

    Arguments: first the codec's settings, then addresses and dtypes as in ``FixedKernels``.
    """

    def encode(self, *args: float) -> int:
        """Write a payload of at most ``nbytes``, the worst case; return the bytes used.

        Args after the settings: dtype, values, numel, out, nbytes, threads. A back end with
        ``stores_sizes`` also takes the address of an int64: it stores the bytes used there, does
        not wait, and returns 0.
        """

    def decode(self, *args: float) -> None:
        """Read ``numel`` values into ``out``, or ``add`` them to fp32 values there.

        Args after the settings: dtype, payload, nbytes, out, numel, add, threads. For a lossless
        codec, dtype is always the encoded dtype, even if ``add`` accumulates into fp32; for other
        codecs it is the dtype of ``out``.
        """


class Kernels(Protocol):
    """A back end: the functions of every codec for tensors on one device."""

    @property
    def stores_sizes(self) -> bool:
        """Return whether encoders store the size at an address instead of waiting."""

    def functions(self, codec: str) -> object:
        """Return an object with the functions of ``codec``. Raises CodecError if it has none."""


class DeviceKernels(Kernels, Protocol):
    """Back end whose decoders do not wait, and so report a damaged payload later."""

    def check(self) -> None:
        """Raise CodecError if a payload was damaged since the last check; waits for the device."""

    def poll(self) -> None:
        """Raise CodecError for damage seen at the previous call; does not wait."""


Functions_co = TypeVar("Functions_co", covariant=True)


class KernelSet(Generic[Functions_co]):
    """Functions of one codec, on the back end of a tensor's device.

    The type parameter is a Protocol of the functions: ``KernelSet[FixedKernels]("zfp")`` has the
    functions of ``cpu/bind_zfp.cpp`` and of ``cuda/zfp.py``.
    """

    def __init__(self, codec: str) -> None:
        self.codec = codec
        # back end of the last call, and its functions
        self._last: tuple[Kernels | None, object] = (None, None)

    def on(self, device: torch.device) -> Functions_co:
        """Return the functions for tensors on ``device``. Raises CodecError as ``kernels_of``."""
        kernels, last = kernels_of(device), self._last
        if last[0] is not kernels:
            last = self._last = kernels, kernels.functions(self.codec)
        return cast(Functions_co, last[1])


class CpuKernels:
    """Back end of CPUs: the modules of the extension, one for each codec."""

    stores_sizes = False

    def __init__(self, extension: object) -> None:
        self._extension = extension

    def functions(self, codec: str) -> object:
        """See ``Kernels``. Raises CodecError if the extension is older than the codec."""
        try:
            return getattr(self._extension, codec)
        except AttributeError:
            raise CodecError(
                f"the CPU kernels were built from other sources, which had none of {codec}; build "
                f"them again with {BUILD}"
            ) from None


@lru_cache(maxsize=1)
def _cpu_kernels() -> CpuKernels:
    try:
        extension = importlib.import_module("hybridcomp.kernels._cpu")
    except ImportError as error:
        raise CodecError(
            f"the CPU kernels are not built ({error}); build them with {BUILD} (needs a C++17 "
            "compiler)"
        ) from error
    version = getattr(extension, "VERSION", 1)
    if version != VERSION:
        raise CodecError(
            f"the CPU kernels were built from other sources: expected version {VERSION}, found "
            f"{version}; build them again with {BUILD}"
        )
    return CpuKernels(extension)


def on_host(functions: str) -> Any:
    """Return the extension's ``functions``, which run on the host, for messages of any device.

    Raises CodecError if the extension is missing or outdated.
    """
    return _cpu_kernels().functions(functions)


#: back ends of GPUs by device index, created at the first use of a codec there
_on_cuda: dict[int, DeviceKernels] = {}


def _cuda_kernels(index: int) -> Kernels:
    if index not in _on_cuda:
        from hybridcomp.kernels.cuda import CudaKernels
        from hybridcomp.kernels.cuda.launcher import CudaLauncher

        _on_cuda[index] = CudaKernels(CudaLauncher(torch.device("cuda", index)))
    return _on_cuda[index]


def check_payloads() -> None:
    """Raise CodecError if a GPU met a damaged payload since the last check; waits for the GPUs.

    Decoders on a CPU raise at once; on a GPU every message would have to wait for that.
    """
    for kernels in _on_cuda.values():
        kernels.check()


def require_kernels(device: torch.device) -> None:
    """Load the kernels for ``device`` before training instead of at the first message.

    Raises ConfigError in one line if the extension is not built, or CuPy or its compiler is
    missing.
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
    """Raise CodecError if, by the previous call, a GPU met a damaged payload; does not wait."""
    for kernels in _on_cuda.values():
        kernels.poll()


def stores_sizes(device: torch.device) -> bool:
    """Return whether encoders on ``device`` store sizes at an address instead of waiting."""
    return kernels_of(device).stores_sizes


def kernels_of(device: torch.device) -> Kernels:
    """Return the back end for tensors on ``device``.

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
