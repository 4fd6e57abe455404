"""The contract of codecs: a deterministic map from a 1-D tensor to bytes and back.

A codec knows no process group and no configuration. It never allocates the payload: the
collective owns the wire buffers, so that one buffer holds the payloads for all destinations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridcomp.codecs.capabilities import Capabilities
from hybridcomp.codecs.checks import VALUE_DTYPES, check_add, check_decode, check_encode
from hybridcomp.codecs.launches import (
    CollectiveKernel,
    MultiTensorKernel,
    PlannedKernel,
)
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.kernels import DTYPE_CODES, FixedKernels, KernelSet

if TYPE_CHECKING:
    from hybridcomp.codecs.varying_pieces import PieceKernel

__all__ = [
    "Codec", "CollectiveKernel", "DTYPE_CODES", "FixedCodec", "FixedKernels",
    "MultiTensorKernel", "PAYLOAD_ALIGN", "PlannedKernel", "VALUE_DTYPES", "align",
    "check_add", "check_decode", "check_encode",
]  # fmt: skip

#: every payload starts at a multiple of this many bytes inside a wire buffer, and its
#: ``wire_nbytes`` is a multiple of it, so that kernels may use aligned vector loads
PAYLOAD_ALIGN = 16

#: element or byte counts, one for each of many payloads
Lengths = npt.NDArray[np.int64]
#: number of values for which compression ratios are stated: 4 MiB of fp32
TYPICAL_NUMEL = 1 << 20


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to ``PAYLOAD_ALIGN``."""
    return -(-nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


class Codec(Capabilities, ABC):
    """One codec with its settings fixed. Instances are immutable and may be shared.

    ``Capabilities`` declares its properties; this class has its methods.

    Contracts that every codec keeps (``codecs/testing.py`` checks them):

    * bytes depend on the values only: same values, same bytes, on every device and thread count;
    * a NaN or Inf that is encoded decodes to a non-finite value at the same element, or at
      least makes every element of its block non-finite;
    * decoded values and sums have the same bits on every device, except for NaNs: where arithmetic
      made or moved one, its sign and payload are the device's (a GPU writes 0x7fffffff, narrowed to
      the dtype, a CPU keeps 0x7fc00000, 0xffc00000 or the input's bits). Two such NaNs are equal.
      Payloads, and the values that a lossless codec decodes, keep the bits of NaNs as well;
    * ``numel == 0`` is legal and costs 0 bytes.
    """

    @abstractmethod
    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the payload bytes of ``numel`` values of ``dtype``, a multiple of PAYLOAD_ALIGN.

        Exact if ``fixed_size``, otherwise the worst case.
        """

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> int:
        """Encode ``values`` (1-D, contiguous, a VALUE_DTYPES dtype) into ``out``.

        ``out`` is 1-D contiguous uint8 of at least ``wire_nbytes`` bytes on the same device.
        Every one of the returned number of bytes is written (padding as zeros), so payloads are
        reproducible. Returns the bytes used, a multiple of PAYLOAD_ALIGN.
        """

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        """Encode and store the bytes used in ``size``: one int64 on the values' device.

        On a GPU codecs of variable size return without waiting for the size.
        """
        size.fill_(self.encode(values, out))

    def encode_kept(self, values: Tensor, residual: QuantizedResidual, out: Tensor) -> bool:
        """Encode ``values`` + ``residual`` as fp32 into ``out`` in one pass; return whether done.

        The residual becomes the encoding's error. Returns False, with nothing changed, if no kernel
        can do it: for this codec, on this device, or for a view that is not ``in_blocks``.
        """
        return False

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode ``payload`` (1-D uint8) into all of ``out`` (1-D contiguous, VALUE_DTYPES).

        Bytes behind the payload change nothing, so a whole slot may be passed.
        The dtype of ``out`` may differ from the encoded one only for lossy codecs; a lossless
        codec raises CodecError if it does. Raises CodecError on a payload that is too short.
        """

    @abstractmethod
    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        """Add the decoded ``payload`` to ``out``, 1-D contiguous float32.

        ``dtype`` is the dtype that was encoded.
        """

    def fused(self, device: torch.device) -> CollectiveKernel | None:
        """Return kernels that process all chunks of a collective, if ``device`` has them."""
        return None

    def each(self, device: torch.device) -> MultiTensorKernel | None:
        """Return kernels that process several tensors in one launch, if ``device`` has them."""
        return None

    def pieces(self, device: torch.device) -> PieceKernel | None:
        """Return kernels for many payloads of variable size at once, if ``device`` has them."""
        return None

    def kernels_on(self, device: torch.device) -> tuple[int, FixedKernels] | None:
        """Return a setting and the kernels behind ``encode``, ``decode`` and ``decode_add`` on
        ``device``, for callers that have already checked tensors and sizes; None: call the methods.
        """
        return None

    def wire_nbytes_of(self, numels: Lengths, dtype: torch.dtype) -> Lengths:
        """Return ``wire_nbytes`` of each of ``numels`` (int64), as int64."""
        lengths, places = np.unique(numels, return_inverse=True)
        sizes = [self.wire_nbytes(int(numel), dtype) for numel in lengths]
        return np.array(sizes, dtype=np.int64)[places]

    def planned(self, device: torch.device) -> PlannedKernel | None:
        """Return kernels that process many slices of one tensor at once, if ``device`` has them."""
        return None

    @abstractmethod
    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return the largest |decoded - value| of a finite element whose block has this absmax.

        Holds for decoding to float32; decoding to a 16-bit dtype adds its rounding. 0.0 when
        lossless.
        """

    def split_error_budget(
        self,
        count: int,
        world_size: int,
        *,
        result: torch.dtype = torch.float32,
        exact: int = 0,
    ) -> tuple[Codec, ...]:
        """Return the codecs of the ``count`` quantizations of one collective.

        Args:
            count: quantizations that every value goes through, 1 or 2.
            world_size: ranks whose values are summed; 1 when values are only moved.
            result: dtype in which the collective returns them.
            exact: number of these ranks whose values are added unquantized.
        """
        return (self,) * count

    def for_presummed(self, ranks: int, result: torch.dtype = torch.float32) -> Codec:
        """Return this codec for values that are already fp32 sums of ``ranks`` ranks.

        ``result``: dtype to which the collective's fp32 result is rounded afterwards.
        """
        return self

    def for_message(self, numel: int, dtype: torch.dtype, world_size: int) -> Codec:
        """Return the codec of a message of ``numel`` values of ``dtype`` on each of the ranks.

        Depends on the arguments only, so the ranks agree.
        """
        return self

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether messages of ``dtype`` are encoded; others are sent natively."""
        return dtype in VALUE_DTYPES

    def against(self, held: Tensor) -> Codec:
        """Return this codec for a message whose previous version every receiver holds.

        Only codecs with ``references`` differ: they encode the change from ``held``, which is as
        long as the message, and decode in place into tensors that hold the earlier version.
        """
        return self

    def part(self, start: int, stop: int) -> Codec:
        """Return this codec for the values from ``start`` to ``stop`` of its message."""
        return self

    @property
    @abstractmethod
    def spec(self) -> str:
        """Return name and settings, like ``blockint(bits=4)``; equal specs mean equal bytes."""

    def bits_per_value(self, dtype: torch.dtype) -> float:
        """Return bits a value of a typical message of ``dtype``; the worst case if sizes vary."""
        return self.wire_nbytes(TYPICAL_NUMEL, dtype) * 8 / TYPICAL_NUMEL

    def cost_summary(self, *, summed: bool) -> str:
        """Describe this codec's cost in the start-up line; ``summed``: messages are sums."""
        if not self.fixed_size:
            lossless = ", lossless" if self.lossless else ""
            return f"{self.spec}{lossless}, size varies with the values"
        wide, narrow = self.bits_per_value(torch.float32), self.bits_per_value(torch.bfloat16)
        return (
            f"{self.spec}, {wide:.4g} bits a value: {32 / wide:.3g}x less than fp32, "
            f"{16 / narrow:.3g}x less than bf16"
        )

    def __repr__(self) -> str:
        return self.spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)


class FixedCodec(Codec):
    """Lossy codec of fixed size whose kernels take one integer setting of the subclass."""

    lossless = False
    fixed_size = True
    #: set by the subclass
    kernels: ClassVar[KernelSet[FixedKernels]]

    @property
    @abstractmethod
    def _setting(self) -> int:
        """Integer setting for the kernels."""

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        if not fit(values, out, nbytes):
            check_encode(self.spec, values, out, nbytes)
        self.kernels.on(values.device).encode(
            self._setting,
            DTYPE_CODES[values.dtype],
            values.data_ptr(),
            values.numel(),
            out.data_ptr(),
            nbytes,
            torch.get_num_threads(),
        )
        return nbytes

    def kernels_on(self, device: torch.device) -> tuple[int, FixedKernels] | None:
        own = type(self)
        methods = (own.encode, own.decode, own.decode_add)
        if methods != (FixedCodec.encode, FixedCodec.decode, FixedCodec.decode_add):
            return None  # a subclass with another encoding
        return self._setting, self.kernels.on(device)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        if out.dtype != torch.float32 or dtype not in VALUE_DTYPES:
            check_add(self.spec, out, dtype)
        self._decode(payload, out, add=True)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        nbytes = self.wire_nbytes(out.numel(), out.dtype)
        if not fit(out, payload, nbytes):
            check_decode(self.spec, payload, out, nbytes)
        self.kernels.on(out.device).decode(
            self._setting,
            DTYPE_CODES[out.dtype],
            payload.data_ptr(),
            nbytes,
            out.data_ptr(),
            out.numel(),
            add,
            torch.get_num_threads(),
        )


def fit(values: Tensor, payload: Tensor, wire_nbytes: int) -> bool:
    """Return in one check whether ``check_encode`` and ``check_decode`` would both pass."""
    return (
        values.dtype in VALUE_DTYPES
        and values.dim() == payload.dim() == 1
        and values.is_contiguous()
        and payload.is_contiguous()
        and payload.dtype == torch.uint8
        and payload.device == values.device
        and payload.numel() >= wire_nbytes
    )
