"""What every codec is: a deterministic map from a 1-D tensor to bytes and back.

A codec knows no process group and no configuration. It never allocates the payload: the
collective owns the wire buffers, so that one buffer holds the payloads for all destinations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp.codecs.capabilities import Capabilities

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


class Fused(Protocol):
    """Kernels that take all chunks of a reduction at once; payloads are those of the codec.

    Chunk c holds elements ``[c * chunk, (c + 1) * chunk)``; the payloads of the chunks, without
    that of ``skip``, follow each other ``slot`` bytes apart, the size of a whole chunk's.
    """

    def encode(
        self,
        values: Tensor,
        chunk: int,
        slot: int,
        skip: int,
        out: Tensor,
        residual: Tensor | None = None,
    ) -> None:
        """Every chunk but ``skip`` into ``out``.

        With a ``residual`` (fp32, as long as ``values``) ``values + residual`` is sent, and outside
        of ``skip`` the residual becomes what the encoding left out, 0 where that is not finite.
        """

    def reduce(
        self,
        payloads: Tensor,
        own: Tensor,
        ranks: int,
        me: int,
        out: Tensor,
        residual: Tensor | None = None,
        owner_residual: Tensor | None = None,
    ) -> None:
        """Encode the fp32 sum, in rank order, of ``own`` (exact) and the others' ``payloads``.

        A 16-bit result that would overflow becomes Inf in the sum, as natively. ``residual`` (fp32,
        as long as ``own``) is added to ``own`` and becomes 0. ``owner_residual`` is what the sum
        begins with; it becomes what decoding to the dtype of ``own`` leaves out.
        """

    def sum(
        self,
        payloads: Tensor,
        own: Tensor,
        ranks: int,
        me: int,
        out: Tensor,
        residual: Tensor | None = None,
    ) -> None:
        """The fp32 sum, in rank order, into ``out``; ``own`` and ``residual`` as in ``reduce``."""

    def decode(self, payloads: Tensor, chunk: int, slot: int, out: Tensor) -> None:
        """All chunks into ``out``."""


class Each(Protocol):
    """Kernels that take several tensors of one dtype in one launch; payloads are the codec's.

    Arguments are as ``encode`` and ``decode`` of a codec want them, and are not checked again.
    """

    def encode(
        self,
        values: Sequence[Tensor],
        out: Sequence[Tensor],
        residuals: Sequence[Tensor] | None = None,
    ) -> None:
        """Each of ``values`` into its ``out``.

        With ``residuals`` (fp32) ``values + residual`` is sent, and the residual becomes what the
        encoding left out, 0 where that is not finite.
        """

    def decode(
        self, payloads: Sequence[Tensor], out: Sequence[Tensor], *, add: bool = False
    ) -> None:
        """Each of ``payloads`` into its ``out``; ``add``: onto what is there, in fp32."""


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
