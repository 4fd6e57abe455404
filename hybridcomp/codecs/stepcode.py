"""stepcode: lossless; 16-bit weights as exact steps from a reference that both sides hold.

An optimizer step leaves a weight unchanged or changes it by a few units in the last place. How
likely each change is depends on the weight's old exponent, which the receiver knows from the
reference. The changes are entropy-coded with a model for each of 16 exponents, learned from the
message. The format is at the top of ``kernels/formats/stepcode.h``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hybridcomp.codecs.base import align
from hybridcomp.codecs.checks import (
    check_count,
    check_decode,
    check_dtype,
    check_encode,
    check_flat,
    check_size,
)
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, KernelSet, stores_sizes

#: dtypes of the values
STEP_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
HEADER = 32
#: bytes of the largest model, values of the smallest tile, as defined in ``stepcode.h`` and
#: ``stepcode_model.h``
MODEL, LEAST_TILE = 4912, 8192
#: first bytes of the header: magic, version
_START = b"hcst\x01"
#: mode, in the header, of a payload without a reference; the codec that encodes its values
_NO_REFERENCE, _PLAIN = 2, ExpCode()


def cpu_instructions() -> str:
    """Return the instruction set that the CPU kernels use: "avx512", "avx2" or "plain"."""
    kernels: Any = KernelSet[Any]("instructions").on(torch.device("cpu"))
    found: str = kernels.used()
    return found


class StepCodeKernels(Protocol):
    """Kernels of stepcode on every back end; addresses and dtype codes as ``FixedKernels``."""

    def encode(
        self,
        dtype: int,
        values: int,
        reference: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        size: int = 0,
        /,
    ) -> int:
        """Write a payload of at most ``nbytes``, which is the worst case."""

    def decode(
        self,
        dtype: int,
        payload: int,
        nbytes: int,
        reference: int,
        out: int,
        numel: int,
        threads: int,
        /,
    ) -> None:
        """Read values; ``out`` may be ``reference``."""


class StepCode:
    """Lossless for bf16 and fp16, variable size: the entropy of the steps plus a few percent.

    It is no ``Codec``, since ``encode`` and ``decode`` take a reference. Instances have no state
    and may be shared. All bit patterns of values and reference are exact, including -0.0,
    infinities and the payloads of NaNs. The bytes depend only on values and reference, not on the
    device or the number of threads.

    A payload does not identify its reference. With a wrong reference, decoding raises or gives
    wrong values, so whoever sends versions of weights adds a version number and a checksum.
    """

    name: ClassVar[str] = "stepcode"
    kernels = KernelSet[StepCodeKernels](name)

    @property
    def spec(self) -> str:
        """Return name and settings; equal specs mean equal bytes."""
        return "stepcode()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the most bytes that ``numel`` values of ``dtype`` take, a multiple of 16."""
        check_dtype(self.spec, dtype, STEP_DTYPES)
        check_count(self.spec, numel)
        if numel == 0:
            return 0
        steps = align(HEADER + MODEL + 12 * -(-numel // LEAST_TILE) + 2 * numel)
        return max(steps, HEADER + _PLAIN.wire_nbytes(numel, dtype))

    def encode(self, values: Tensor, reference: Tensor | None, out: Tensor) -> int:
        """Encode ``values`` into ``out``; returns the bytes used, a multiple of 16.

        Args:
            values: 1-D, contiguous, bf16 or fp16.
            reference: as many values of the same dtype and device, which the receiver has too.
                None if the receiver has no reference: ``expcode`` then encodes the values.
            out: 1-D contiguous uint8 of at least ``wire_nbytes`` bytes on the same device. Bytes
                beyond those used may be overwritten.

        Raises:
            CodecError: a tensor has another shape, dtype or device, or ``out`` is too short.
        """
        return self._encode(values, reference, out)

    def encode_into(
        self, values: Tensor, reference: Tensor | None, out: Tensor, size: Tensor
    ) -> None:
        """Encode and store the bytes used in ``size``: one int64 on the values' device.

        On a GPU it returns without waiting for the size. Raises as ``encode`` does.
        """
        if reference is not None and stores_sizes(values.device) and values.numel():
            check_size(self.spec, size, values.device)
            self._encode(values, reference, out, size.data_ptr())
        else:
            size.fill_(self._encode(values, reference, out))

    def decode(self, payload: Tensor, reference: Tensor | None, out: Tensor) -> None:
        """Decode ``payload`` (1-D uint8) into all of ``out`` (1-D contiguous, bf16 or fp16).

        Bytes after the payload are ignored, so a whole slot may be passed.

        Args:
            payload: what ``encode`` wrote for as many values of the dtype of ``out``.
            reference: the reference of the encoding; may be ``out`` itself, which is then updated
                in place. None for a payload without a reference, whose header the host must read:
                on a GPU it waits for it.
            out: is overwritten; its values are undefined after an error.

        Raises:
            CodecError: a tensor has another shape, dtype or device; the payload is cut, damaged, or
                of another codec, number of values or dtype; the payload needs a reference and
                ``reference`` is None, or the reverse. On a GPU ``codecs.check_payloads`` raises the
                errors of payloads with a reference.
        """
        check_dtype(self.spec, out.dtype, STEP_DTYPES)
        check_decode(self.spec, payload, out, HEADER if out.numel() else 0)
        if reference is not None:
            self._check_reference(reference, out, "out")
            apart = abs(reference.data_ptr() - out.data_ptr())
            if 0 < apart < out.nbytes:
                raise CodecError(f"{self.spec}: out overlaps the reference without being it")
        if out.numel() == 0:
            return
        if reference is None:
            self._decode_plain(payload, out)
        else:
            self._decode_steps(payload, reference, out)

    def _encode(self, values: Tensor, reference: Tensor | None, out: Tensor, *size: int) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        if reference is None:
            return self._encode_plain(values, out)
        self._check_reference(reference, values, "values")
        return self.kernels.on(values.device).encode(
            DTYPE_CODES[values.dtype],
            values.data_ptr(),
            reference.data_ptr(),
            values.numel(),
            out.data_ptr(),
            nbytes,
            torch.get_num_threads(),
            *size,
        )

    def _decode_steps(self, payload: Tensor, reference: Tensor, out: Tensor) -> None:
        try:
            self.kernels.on(out.device).decode(
                DTYPE_CODES[out.dtype],
                payload.data_ptr(),
                payload.numel(),
                reference.data_ptr(),
                out.data_ptr(),
                out.numel(),
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise self._refused(out, str(error)) from error

    def _encode_plain(self, values: Tensor, out: Tensor) -> int:
        if values.numel() == 0:
            return 0
        used = _PLAIN.encode(values, out[HEADER:])
        head = bytearray(HEADER)
        head[:8] = _START + bytes((DTYPE_CODES[values.dtype], _NO_REFERENCE, 0))
        head[8:16] = values.numel().to_bytes(8, "little")
        out[:HEADER] = torch.tensor(list(head), dtype=torch.uint8, device="cpu")
        return HEADER + used

    def _decode_plain(self, payload: Tensor, out: Tensor) -> None:
        start = bytes(payload[:HEADER].tolist())
        if start[:5] != _START:
            raise self._refused(out, "payload is not one of this codec and version")
        if start[6] != _NO_REFERENCE:
            raise self._refused(
                out,
                "payload holds steps from a reference, found reference=None; pass the values "
                "against which it was encoded",
            )
        if start[5] != DTYPE_CODES[out.dtype]:
            raise self._refused(out, "payload holds another dtype")
        if int.from_bytes(start[8:16], "little") != out.numel():
            raise self._refused(out, "payload holds another number of values")
        _PLAIN.decode(payload[HEADER:], out)

    def _refused(self, out: Tensor, reason: str) -> CodecError:
        return CodecError(f"{self.spec}: cannot decode {out.numel()} {out.dtype}: {reason}")

    def _check_reference(self, reference: Tensor, other: Tensor, name: str) -> None:
        found = (reference.dtype, reference.device, reference.numel())
        if found != (other.dtype, other.device, other.numel()):
            raise CodecError(
                f"{self.spec}: the reference must be like {name}: expected {other.numel()} "
                f"{other.dtype} on {other.device}, found {found[2]} {found[0]} on {found[1]}"
            )
        check_flat(self.spec, "the reference", reference)
