"""Lossy codecs of fixed size whose kernels take one integer setting."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.checks import check_add, check_decode, check_encode
from hybridcomp.kernels import DTYPE_CODES, FixedDecode, FixedEncode


class FixedCodec(Codec):
    """Runs a pair of kernels; what they compute is up to the subclass."""

    lossless = False
    fixed_size = True

    @abstractmethod
    def _encode_kernel(self, device: torch.device) -> FixedEncode:
        """The kernel that writes payloads. Raises CodecError if the device has none."""

    @abstractmethod
    def _decode_kernel(self, device: torch.device) -> FixedDecode:
        """The kernel that reads payloads. Raises CodecError if the device has none."""

    @property
    @abstractmethod
    def _setting(self) -> int:
        """What the kernels take as their setting."""

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        self._encode_kernel(values.device)(
            self._setting,
            DTYPE_CODES[values.dtype],
            values.data_ptr(),
            values.numel(),
            out.data_ptr(),
            nbytes,
            torch.get_num_threads(),
        )
        return nbytes

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        self._decode(payload, out, add=True)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        nbytes = self.wire_nbytes(out.numel(), out.dtype)
        check_decode(self.spec, payload, out, nbytes)
        self._decode_kernel(out.device)(
            self._setting,
            DTYPE_CODES[out.dtype],
            payload.data_ptr(),
            nbytes,
            out.data_ptr(),
            out.numel(),
            add,
            torch.get_num_threads(),
        )
