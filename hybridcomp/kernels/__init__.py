"""Kernels: one portable header per codec, and a loader for what was compiled around it.

``<codec>.h`` encodes and decodes blocks, on a host and on a device; ``cpu*.cpp`` loop over it and
are built at install into ``hybridcomp.kernels._cpu``. A back end is a set of functions on raw
pointers, described by :class:`Kernels`; codecs ask :func:`kernels_of` for the one of their tensors.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Protocol, cast

import torch

from hybridcomp.errors import CodecError

#: dtype codes of the kernels (kernels/cpu.h, Dtype)
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Kernels(Protocol):
    """One back end. Addresses come from ``Tensor.data_ptr``; dtypes are DTYPE_CODES.

    ``add`` accumulates into fp32 instead of writing; it needs the dtype code of fp32. Functions
    raise ValueError when a buffer is too short for what they are asked to do.
    """

    def blockint_encode(
        self, bits: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int, /
    ) -> None: ...

    def blockint_decode(
        self,
        bits: int,
        dtype: int,
        payload: int,
        nbytes: int,
        out: int,
        numel: int,
        add: bool,
        threads: int,
        /,
    ) -> None: ...


@lru_cache(maxsize=1)
def _cpu_kernels() -> Kernels:
    try:
        module = importlib.import_module("hybridcomp.kernels._cpu")
    except ImportError as error:
        raise CodecError(
            f"the CPU kernels are not built ({error}); build them with `pip install .`, or with "
            "`pip install --no-build-isolation -e .` in a checkout (needs a C++17 compiler)"
        ) from error
    return cast(Kernels, module)


def kernels_of(device: torch.device) -> Kernels:
    """The back end for tensors on ``device``.

    Raises:
        CodecError: the device has no back end, or the extension was not built.
    """
    if device.type == "cpu":
        return _cpu_kernels()
    raise CodecError(
        f"no codec kernels for device {str(device)!r}: this version has the CPU back end only; "
        "move the tensor to the CPU or leave this dimension native"
    )
