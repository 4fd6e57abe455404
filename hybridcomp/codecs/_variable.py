"""Codecs of variable payload size, which the encoder returns or stores at an address."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hybridcomp.codecs.base import Codec, check_size
from hybridcomp.kernels import stores_sizes


class VariableCodec(Codec):
    """Codec of variable size that encodes by the subclass's ``_encode``."""

    fixed_size = False

    @abstractmethod
    def _encode(self, values: Tensor, out: Tensor, *size: int) -> int:
        """Encode and return the size; an address as last argument takes the size instead."""

    def encode(self, values: Tensor, out: Tensor) -> int:
        return self._encode(values, out)

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        if stores_sizes(values.device) and values.numel():
            check_size(self.spec, size, values.device)
            self._encode(values, out, size.data_ptr())
        else:
            size.fill_(self._encode(values, out))
