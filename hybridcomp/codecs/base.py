"""What every codec is: a deterministic map from a 1-D tensor to bytes and back.

A codec knows no process group and no configuration. It never allocates the payload: the
collective owns the wire buffers, so that one buffer holds the payloads for all destinations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from hybridcomp.codecs.capabilities import Capabilities
from hybridcomp.codecs.launches import Each, Fused
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, FixedKernels, KernelSet

__all__ = [
    "PAYLOAD_ALIGN", "VALUE_DTYPES", "Codec", "Each", "FixedCodec", "Fused", "align", "check_add",
    "check_decode", "check_dtype", "check_encode", "check_payload", "check_size",
]  # fmt: skip

#: dtypes that a codec accepts as values; everything else travels native
VALUE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

#: every payload starts at a multiple of this many bytes inside a wire buffer, and its
#: ``wire_nbytes`` is a multiple of it, so that kernels may use aligned vector loads
PAYLOAD_ALIGN = 16

#: values of the message that ratios are stated for: 4 MiB of fp32
TYPICAL_NUMEL = 1 << 20


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to ``PAYLOAD_ALIGN``."""
    return -(-nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


class Codec(Capabilities, ABC):
    """One codec with its settings fixed. Instances are immutable and may be shared.

    What it can do stands in ``Capabilities``; here is what it does.

    Contracts that every codec keeps (``codecs/testing.py`` checks them):

    * bytes depend on the values only: same values, same bytes, on every device and thread count;
    * a NaN or Inf that is encoded decodes to a non-finite value at the same element, or at
      least makes every element of its block non-finite;
    * decoded values and sums are the same bits on every device, but for NaNs: where arithmetic
      made or moved one, its sign and payload are the device's (a GPU writes 0x7fffffff and what
      narrowing leaves of it, a CPU keeps 0x7fc00000, 0xffc00000 or what came in). Two such NaNs
      are equal. Payloads, and what a lossless codec decodes, have the bits of NaNs as well;
    * ``numel == 0`` is legal and costs 0 bytes.
    """

    @abstractmethod
    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload for ``numel`` values of ``dtype``, a multiple of PAYLOAD_ALIGN.

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
        """``encode``, with the bytes used stored in ``size``: one int64 on the values' device.

        On a GPU codecs of variable size return without waiting for it.
        """
        size.fill_(self.encode(values, out))

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode ``payload`` (1-D uint8) into all of ``out`` (1-D contiguous, VALUE_DTYPES).

        Bytes behind what was encoded change nothing, so all of a slot may be given.
        The dtype of ``out`` may differ from the encoded one only for lossy codecs; a lossless
        codec raises CodecError if it does. Raises CodecError on a payload that is too short.
        """

    @abstractmethod
    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        """``out += decode(payload)`` with ``out`` 1-D contiguous float32.

        ``dtype`` is the dtype that was encoded.
        """

    def fused(self, device: torch.device) -> Fused | None:
        """One launch for all chunks of a collective, where the back end of ``device`` has that."""
        return None

    def each(self, device: torch.device) -> Each | None:
        """One launch for several tensors, where the back end of ``device`` has that."""
        return None

    @abstractmethod
    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Largest possible |decoded - value| of a finite element whose block has this absmax.

        Holds for decoding to float32; decoding to a 16-bit dtype adds its rounding. 0.0 when
        lossless.
        """

    def hops(
        self,
        count: int,
        world_size: int,
        *,
        result: torch.dtype = torch.float32,
        exact: int = 0,
    ) -> tuple[Codec, ...]:
        """The codecs of the ``count`` quantizations of one collective.

        Args:
            count: quantizations that every value goes through, 1 or 2.
            world_size: ranks whose values are summed; 1 when values are only moved.
            result: dtype in which the collective returns them.
            exact: of these ranks, how many add their own values unquantized.
        """
        return (self,) * count

    def summing(self, ranks: int, result: torch.dtype = torch.float32) -> Codec:
        """This codec where every encoded value is an fp32 sum of ``ranks`` ranks already.

        ``result``: dtype that the collective's fp32 result is rounded to afterwards.
        """
        return self

    def for_message(self, numel: int, dtype: torch.dtype, world_size: int) -> Codec:
        """The codec of a message of ``numel`` values of ``dtype`` on each of ``world_size`` ranks.

        Depends on nothing else, so the ranks agree.
        """
        return self

    @property
    @abstractmethod
    def spec(self) -> str:
        """Name and settings, for example ``blockint(bits=4)``; equal specs mean equal bytes."""

    def bits_per_value(self, dtype: torch.dtype) -> float:
        """Bits a value in a typical message of ``dtype``; the worst case when the size varies."""
        return self.wire_nbytes(TYPICAL_NUMEL, dtype) * 8 / TYPICAL_NUMEL

    def figures(self, *, summed: bool) -> str:
        """What it costs, for the line at start-up; ``summed``: messages are sums."""
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
    """A lossy codec of fixed size whose kernels take one integer setting, up to the subclass."""

    lossless = False
    fixed_size = True
    #: of the subclass
    kernels: ClassVar[KernelSet[FixedKernels]]

    @property
    @abstractmethod
    def _setting(self) -> int:
        """What the kernels take as their setting."""

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
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

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        self._decode(payload, out, add=True)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        nbytes = self.wire_nbytes(out.numel(), out.dtype)
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


def check_dtype(spec: str, dtype: torch.dtype) -> None:
    """Raise CodecError unless ``dtype`` is one that codecs accept as values."""
    if dtype not in VALUE_DTYPES:
        raise CodecError(f"{spec}: dtype {dtype} cannot be encoded; expected one of {VALUE_DTYPES}")


def _check_flat(spec: str, what: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise CodecError(
            f"{spec}: {what} must be 1-D and contiguous, "
            f"found shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def check_encode(spec: str, values: Tensor, out: Tensor, wire_nbytes: int) -> None:
    """Raise CodecError unless ``values`` can be encoded into ``out``."""
    check_dtype(spec, values.dtype)
    _check_flat(spec, "values", values)
    check_payload(spec, out, wire_nbytes, values.device, "out")


def check_decode(spec: str, payload: Tensor, out: Tensor, wire_nbytes: int) -> None:
    """Raise CodecError unless ``payload`` is long enough to decode into ``out``."""
    check_dtype(spec, out.dtype)
    _check_flat(spec, "out", out)
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
    _check_flat(spec, what, payload)
    if payload.device != device:
        raise CodecError(f"{spec}: {what} is on {payload.device}, the values are on {device}")
    if payload.numel() < wire_nbytes:
        raise CodecError(
            f"{spec}: {what} is too short: {payload.numel()} bytes, expected at least {wire_nbytes}"
        )


def check_size(spec: str, size: Tensor, device: torch.device) -> None:
    """Raise CodecError unless ``size`` can take the bytes used."""
    if size.dtype != torch.int64 or size.numel() != 1 or size.device != device:
        raise CodecError(
            f"{spec}: size must be one torch.int64 on {device}, found {size.numel()} {size.dtype} "
            f"on {size.device}"
        )
