"""Codecs of variable payload size, which the encoder returns or stores at an address.

Their kernels take the codec's settings first, then the same arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.checks import check_add, check_decode, check_dtype, check_encode, check_size
from hybridcomp.codecs.varying_pieces import PieceKernel, varying_pieces
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, KernelSet, VariableKernels, stores_sizes


class VariableCodec(Codec):
    """Codec of variable size that calls the subclass's encode and decode kernels."""

    fixed_size = False
    #: both kernels take ``_settings_for`` first, then the arguments below
    kernels: ClassVar[KernelSet[VariableKernels]]

    @property
    @abstractmethod
    def _settings(self) -> tuple[float, ...]:
        """Settings of the codec, the first arguments of its kernels."""

    def _settings_for(self, numel: int) -> tuple[float, ...]:
        """Settings, then further arguments that depend on ``numel``, the values of a message."""
        return self._settings

    @property
    @abstractmethod
    def _least_nbytes(self) -> int:
        """Size of the smallest possible payload; the kernel checks the rest against its header."""

    def encode(self, values: Tensor, out: Tensor) -> int:
        return self._encode(values, out)

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        if stores_sizes(values.device) and values.numel():
            check_size(self.spec, size, values.device)
            self._encode(values, out, size.data_ptr())
        else:
            size.fill_(self._encode(values, out))

    def _encode(self, values: Tensor, out: Tensor, *size: int) -> int:
        """Encode and return the size; an address as last argument receives the size."""
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        return self.kernels.on(values.device).encode(
            *self._settings_for(values.numel()),
            DTYPE_CODES[values.dtype],
            values.data_ptr(),
            values.numel(),
            out.data_ptr(),
            nbytes,
            torch.get_num_threads(),
            *size,
        )

    def pieces(self, device: torch.device) -> PieceKernel | None:
        functions = self.kernels.on(device)
        return varying_pieces(functions, device, self._settings, self.lossless)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, out.dtype, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        # a lossless decoder must be given the encoded dtype; a lossy payload names it
        self._decode(payload, out, dtype if self.lossless else out.dtype, add=True)

    def _decode(self, payload: Tensor, out: Tensor, dtype: torch.dtype, *, add: bool) -> None:
        check_decode(self.spec, payload, out, self._least_nbytes if out.numel() else 0)
        try:
            self.kernels.on(out.device).decode(
                *self._settings_for(out.numel()),
                DTYPE_CODES[dtype],
                payload.data_ptr(),
                payload.numel(),
                out.data_ptr(),
                out.numel(),
                add,
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise CodecError(
                f"{self.spec}: cannot decode {out.numel()} {dtype}: {error}"
            ) from error


class LosslessCodec(VariableCodec):
    """Codec of variable size that restores every value bit for bit."""

    lossless = True
    about: ClassVar[str] = "lossless, variable size"

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        return 0.0
