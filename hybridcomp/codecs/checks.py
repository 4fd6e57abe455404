"""Checks of a codec before it passes addresses to a kernel; for codecs of other packages."""

from __future__ import annotations

from hybridcomp.codecs.base import (
    check_add,
    check_decode,
    check_dtype,
    check_encode,
    check_payload,
    check_size,
)

__all__ = [
    "check_add", "check_decode", "check_dtype", "check_encode", "check_payload", "check_size",
]  # fmt: skip
