"""Codecs whose payloads vary in size: the encoder returns it, or leaves it where it is told."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hybridcomp.codecs.base import Codec, check_size
from hybridcomp.kernels import stores_sizes


class VariableCodec(Codec):
    """Encodes through ``_encode``; what that computes is up to the subclass."""

    fixed_size = False

    @abstractmethod
    def _encode(self, values: Tensor, out: Tensor, *size: int) -> int:
        """Call the encoder, with the address for the size as its last argument where given."""

    def encode(self, values: Tensor, out: Tensor) -> int:
        return self._encode(values, out)

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        if stores_sizes(values.device) and values.numel():
            check_size(self.spec, size, values.device)
            self._encode(values, out, size.data_ptr())
        else:
            size.fill_(self._encode(values, out))
