"""Check tensors and sizes before a codec passes addresses to a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp.errors import CodecError

__all__ = [
    "DTYPES", "DTYPE_NAMES", "VALUE_DTYPES", "check_add", "check_count", "check_decode",
    "check_dtype", "check_encode", "check_flat", "check_payload", "check_size",
]  # fmt: skip

#: message dtypes by the names used in command-line options and files
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: dtypes that a codec accepts as values; tensors of other dtypes are sent natively
VALUE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def check_count(spec: str, numel: int) -> None:
    """Raise CodecError if a payload's header cannot hold the number of values."""
    if numel >= 2**32:
        raise CodecError(f"{spec}: the format holds fewer than 2^32 values, found {numel}")


def check_dtype(
    spec: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...] = VALUE_DTYPES
) -> None:
    """Raise CodecError unless ``dtype`` is one of ``allowed``."""
    if dtype not in allowed:
        raise CodecError(f"{spec}: dtype {dtype} cannot be encoded; expected one of {allowed}")


def check_flat(spec: str, what: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise CodecError(
            f"{spec}: {what} must be 1-D and contiguous, "
            f"found shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def check_encode(spec: str, values: Tensor, out: Tensor, wire_nbytes: int) -> None:
    """Raise CodecError unless ``values`` can be encoded into ``out``."""
    check_dtype(spec, values.dtype)
    check_flat(spec, "values", values)
    check_payload(spec, out, wire_nbytes, values.device, "out")


def check_decode(spec: str, payload: Tensor, out: Tensor, wire_nbytes: int) -> None:
    """Raise CodecError unless ``payload`` is long enough to decode into ``out``."""
    check_dtype(spec, out.dtype)
    check_flat(spec, "out", out)
    check_payload(spec, payload, wire_nbytes, out.device, "payload")


def check_add(spec: str, out: Tensor, dtype: torch.dtype) -> None:
    """Raise CodecError unless ``out`` can accumulate values that were encoded from ``dtype``."""
    check_dtype(spec, dtype)
    if out.dtype != torch.float32:
        raise CodecError(f"{spec}: decode_add accumulates into float32, found {out.dtype}")


def check_payload(
    spec: str, payload: Tensor, wire_nbytes: int, device: torch.device, what: str = "payload"
) -> None:
    """Raise CodecError unless ``payload`` holds ``wire_nbytes`` bytes on ``device``."""
    if payload.dtype != torch.uint8:
        raise CodecError(f"{spec}: {what} must be uint8, found {payload.dtype}")
    check_flat(spec, what, payload)
    if payload.device != device:
        raise CodecError(f"{spec}: {what} is on {payload.device}, the values are on {device}")
    if payload.numel() < wire_nbytes:
        raise CodecError(
            f"{spec}: {what} is too short: {payload.numel()} bytes, expected at least {wire_nbytes}"
        )


def check_size(spec: str, size: Tensor, device: torch.device) -> None:
    """Raise CodecError unless ``size`` can hold the bytes used."""
    if size.dtype != torch.int64 or size.numel() != 1 or size.device != device:
        raise CodecError(
            f"{spec}: size must be one torch.int64 on {device}, found {size.numel()} {size.dtype} "
            f"on {size.device}"
        )
