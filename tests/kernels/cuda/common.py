"""Compare a back end with the CPU's: payloads, decoded values and sums, bit for bit.

NaNs from arithmetic compare equal: the codec contract leaves sign and payload to the device, and a
GPU makes each 0x7fffffff. Payloads, and values of lossless codecs, compare all bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, Codec, make_codec
from hybridcomp.codecs.topk import TopK
from hybridcomp.kernels import Kernels
from hybridcomp.kernels.cuda import launcher
from tests.codecs import arrays

CODECS: list[Codec] = [
    make_codec("bf16"),
    make_codec("fp16"),
    make_codec("fp8", format="e4m3"),
    make_codec("fp8", format="e5m2"),
    # fields of 8, of 4, of 2 and 1, of all three
    *(make_codec("blockint", bits=bits) for bits in (8, 4, 3, 7)),
    make_codec("blockint", bits=2, rotate=True),
    make_codec("blockint", bits=4, levels="gaussian"),
    make_codec("blockint", bits=4, rotate=True, levels="gaussian"),
    make_codec("blockint", bits=4, levels="lloyd"),
    make_codec("blockint", bits=4, rotate=True, levels="lloyd"),
    make_codec("blockint", bits=4, rounding="random"),
    make_codec("blockint", bits=3, rotate=True, rounding="random"),
    # whole words, short blocks, blocks across words
    *(make_codec("zfp", rate=rate) for rate in (8, 16, 32, 2.5, 9, 12.75)),
    make_codec("mpc", dim=1),
    make_codec("mpc", dim=3),
    make_codec("expcode"),
    make_codec("radix"),
    make_codec("radix", error_bound=1e-1, segment=256),
    make_codec("radix", error_bound=1e-5, mode="abs"),
]

#: also of codecs whose damaged payloads may decode to other values on a device
WITH_TOPK: list[Codec] = [*CODECS, make_codec("topk"), TopK(bits=8, density=1.0)]


def fake_cupy(patch: pytest.MonkeyPatch) -> tuple[mock.MagicMock, mock.MagicMock]:
    """Replace CuPy and the launching extension for a ``CudaLauncher``; return both."""
    cupy, extension = mock.MagicMock(), mock.MagicMock()
    cupy.cuda.Device.return_value.compute_capability = "90"
    cupy.cuda.Module.return_value.get_function.return_value = mock.Mock(ptr=11)
    extension.current_context.return_value = 99
    patch.setitem(sys.modules, "cupy", cupy)
    patch.setattr(launcher, "_extension", lambda: extension)
    patch.setattr(launcher, "stream_getter", lambda: lambda index: 1000 + index)
    patch.setattr(launcher.cuda, "init", lambda: None)
    return cupy, extension


@contextmanager
def kernels_replaced(kernels: Kernels) -> Iterator[None]:
    """Run every codec on ``kernels``, on any device."""
    with mock.patch("hybridcomp.kernels.kernels_of", lambda device: kernels):
        yield


def payload_of(codec: Codec, values: Tensor) -> Tensor:
    """Return the payload, encoded into a dirty buffer."""
    room = values.new_full(
        (codec.wire_nbytes(values.numel(), values.dtype),), 0xA5, dtype=torch.uint8
    )
    return room[: codec.encode(values, room)]


def decoded(codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return bit patterns of the values, as ``dtype``."""
    out = torch.full((numel,), 3.0, dtype=dtype, device=payload.device)
    codec.decode(payload, out)
    return arrays.bits_of(out)


def summed(codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return bit patterns of a sum; ``dtype``: the message's."""
    out = torch.linspace(-1, 1, numel).to(payload.device)
    codec.decode_add(payload, out, dtype)
    return arrays.bits_of(out)


def results(codec: Codec, values: Tensor) -> list[Tensor]:
    """Return all results of a codec on ``values``."""
    payload, numel = payload_of(codec, values), values.numel()
    dtypes = (values.dtype,) if codec.lossless else VALUE_DTYPES
    found = [payload, summed(codec, payload, numel, values.dtype)]
    return found + [decoded(codec, payload, numel, dtype) for dtype in dtypes]


def as_contract(codec: Codec, bits: Tensor, dtype: torch.dtype, *, summed: bool = False) -> Tensor:
    """Return bit patterns of ``dtype`` with NaNs from arithmetic unified."""
    return bits if codec.lossless and not summed else bits_but_nan(bits.view(dtype))


def bits_but_nan(values: Tensor) -> Tensor:
    """Return bit patterns with all NaNs unified."""
    return arrays.bits_of(values.masked_fill(values.isnan(), torch.nan))


def assert_same(codec: Codec, values: Tensor, expected: list[Tensor], found: list[Tensor]) -> None:
    """Compare ``results``; report the first difference."""
    dtypes = (values.dtype,) if codec.lossless else VALUE_DTYPES
    named = [("payload", None), ("sum", torch.float32), *(("decoded", dtype) for dtype in dtypes)]
    for (name, dtype), right, wrong in zip(named, expected, found, strict=True):
        wrong = wrong.cpu()
        assert right.shape == wrong.shape, f"{codec} {name}: {wrong.shape} for {right.shape}"
        if dtype is not None:
            right, wrong = (
                as_contract(codec, bits, dtype, summed=name == "sum") for bits in (right, wrong)
            )
        where = (right != wrong).nonzero().flatten()
        assert not where.numel(), (
            f"{codec} {values.dtype} {name} as {dtype}: differs first at {where[0]}, "
            f"{right[where[0]]:#x} and {wrong[where[0]]:#x}"
        )
