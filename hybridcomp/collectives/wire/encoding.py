"""Encode values into payloads and decode them, with error feedback, fp32 sums and a buffer pool.

The pool keeps scratch and wire buffers between calls. A fresh 32 MiB buffer on a CPU costs 8192
page faults, which takes longer than the codec that fills it. On a GPU torch's caching allocator
reuses memory, so the pool keeps only CPU buffers. The allocator reuses a buffer in the order of the
stream that was current at its allocation: if a handle is waited for on another stream, this stream
must be given to ``record_stream``.
"""

from __future__ import annotations

import threading
from bisect import insort
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.codecs.base import (
    DTYPE_CODES,
    PAYLOAD_ALIGN,
    VALUE_DTYPES,
    Codec,
    FixedKernels,
)  # fmt: skip
from hybridcomp.codecs.casts import CAST_TO
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual
from hybridcomp.errors import CodecError

#: number of 16-bit values in PAYLOAD_ALIGN bytes. A multiple of this many values has in memory the
#: bytes of its payload by the cast codec of the same dtype
CAST_STEP = PAYLOAD_ALIGN // 2
#: elements of the slices that ``settle`` processes; two fp32 slices, 0.5 MB, fit in a core's cache
CACHED = 1 << 16
#: attribute of a GPU buffer: address of the stream on which it was taken
STREAM = "_hybridcomp_stream"


def current_stream(index: int) -> int:
    """Return the address of torch's current stream on GPU ``index``; a Stream object takes 2 us."""
    found = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(found(index) if found else torch.cuda.current_stream(index).cuda_stream)


class Pool:
    """Pool of free uint8 CPU buffers.

    A taken buffer belongs to one call until it is given back, so any number of calls may be in
    flight; the pool grows to the largest number of buffers in use at once. A buffer that is never
    given back (its call failed) is simply freed.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # free buffers by size, smallest first
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return a 1-D uint8 tensor of at least ``nbytes`` bytes, contents undefined."""
        if device.type == "cpu":
            with self._lock:
                for index, buffer in enumerate(self._free):
                    if buffer.numel() >= nbytes:
                        return self._free.pop(index)
                if self._free:
                    # all free buffers are too small for this message: replace the largest
                    self._free.pop()
            with torch.inference_mode(False):  # code outside inference_mode writes it later
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            setattr(made, STREAM, current_stream(made.device.index))
        return made

    def take_fp32(self, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``(buffer to give back, its first numel fp32 elements)``."""
        buffer = self.take(4 * numel, device)
        return buffer, buffer[: 4 * numel].view(torch.float32)

    def take_bytes(self, nbytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``(buffer to give back, its first nbytes bytes)``.

        A buffer of exactly ``nbytes`` is returned itself, since a view takes 1 us.
        """
        buffer = self.take(nbytes, device)
        return buffer, buffer if buffer.numel() == nbytes else buffer[:nbytes]

    def give(self, *buffers: Tensor | None) -> None:
        """Give buffers back; nothing may read or write them any more. None is skipped."""
        for buffer in buffers:
            if buffer is None:
                continue
            if buffer.is_cuda:
                here = current_stream(buffer.device.index)
                if getattr(buffer, STREAM, here) != here:
                    buffer.record_stream(torch.cuda.current_stream(buffer.device))
            elif buffer.is_cpu:
                with self._lock:
                    insort(self._free, buffer, key=Tensor.numel)

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        with self._lock:
            self._free.clear()


#: the pool of this process
POOL = Pool()


@dataclass(eq=False)
class EncodeRequest:
    """One slice of values to encode; the payload may go to several ranks, as the same bytes.

    With a ``residual``, ``values + residual`` is encoded and the residual becomes the encoding
    error. ``residual is values`` means that this tensor already holds the sum. ``decoded`` (fp32)
    receives the decoded values of the payload; it may be ``values`` itself.
    """

    values: Tensor
    residual: Residual | None = None
    decoded: Tensor | None = None
    #: fp32 buffer of an unpacked residual between the two halves of an encoding
    _wide: Tensor | None = None

    def unpacked(self, residual: QuantizedResidual) -> Tensor:
        """Return the quantized ``residual`` as fp32, in a buffer that this request keeps."""
        numel = residual.numel()
        if self._wide is None:
            self._wide, wide = POOL.take_fp32(numel, self.values.device)
            return residual.unpack(wide)
        return self._wide[: 4 * numel].view(torch.float32)

    def pack(self, residual: QuantizedResidual) -> None:
        """Quantize the buffer of ``unpacked`` into ``residual``, and give the buffer back."""
        residual.pack(self.unpacked(residual))
        POOL.give(self._wide)
        self._wide = None


class SlotCoder:
    """Codec of fixed size with kernels that a plan has looked up, for values already checked.

    Slots and payloads have exactly ``wire_nbytes`` bytes, as the plan sized them; the kernels
    refuse shorter ones.
    """

    lossless = False

    def __init__(self, codec: Codec, setting: int, kernels: FixedKernels) -> None:
        self._setting, self._encode, self._decode = setting, kernels.encode, kernels.decode
        self.encode_kept, self.wire_nbytes = codec.encode_kept, codec.wire_nbytes

    def encode(self, values: Tensor, out: Tensor) -> int:
        """Write the payload of ``values`` into all of ``out``; return its bytes."""
        nbytes, code = out.numel(), DTYPE_CODES[values.dtype]
        place, threads = out.data_ptr(), torch.get_num_threads()
        self._encode(self._setting, code, values.data_ptr(), values.numel(), place, nbytes, threads)
        return nbytes

    def decode(self, payload: Tensor, out: Tensor, add: bool = False) -> None:
        """Decode all of ``payload`` into ``out``, or add it there."""
        code, nbytes, threads = DTYPE_CODES[out.dtype], payload.numel(), torch.get_num_threads()
        source, place = payload.data_ptr(), out.data_ptr()
        self._decode(self._setting, code, source, nbytes, place, out.numel(), add, threads)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        """Add the decoded ``payload`` to fp32 ``out``; the encoded ``dtype`` does not matter."""
        self.decode(payload, out, add=True)


#: encodes and decodes the payloads of a message
Coder = Codec | SlotCoder


def coder_of(codec: Codec, device: torch.device) -> Coder:
    """Return ``codec`` with its kernels for ``device`` looked up, if it has such kernels."""
    found = codec.kernels_on(device)
    return codec if found is None else SlotCoder(codec, *found)


def check_values(name: str, tensor: Tensor, index: int | None = None) -> None:
    """Raise CodecError unless ``tensor`` is 1-D, contiguous and of a dtype that codecs encode.

    ``index``: its position in a list ``name``, for the message.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in VALUE_DTYPES:
        name = name if index is None else f"{name}[{index}]"
        raise CodecError(
            f"{name}: expected a 1-D contiguous tensor of {VALUE_DTYPES}, found "
            f"shape {tuple(tensor.shape)}, {tensor.dtype}, contiguous={tensor.is_contiguous()}"
        )


def check_residual(name: str, residual: Residual | None, numel: int) -> None:
    """Raise CodecError unless ``residual`` is None, or flat, of ``numel`` elements, and fp32 or
    quantized."""
    if residual is None:
        return
    dtype = torch.float32
    if isinstance(residual, Tensor):
        check_values(name, residual)
        dtype = residual.dtype
    if dtype != torch.float32 or residual.numel() != numel:
        raise CodecError(
            f"{name}: expected {numel} torch.float32 elements, found {residual.numel()} "
            f"{dtype} elements"
        )


def decode_fp32(codec: Coder, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Decode values of ``dtype`` into fp32 ``out``; a lossless codec adds them to zeros there."""
    if codec.lossless and dtype != torch.float32:
        out.zero_()
        codec.decode_add(payload, out, dtype)
    else:
        codec.decode(payload, out)


def add_values(total: Tensor, values: Tensor) -> None:
    """Add ``values``, fp32/bf16/fp16, to ``total``, fp32.

    On one core torch adds 4 Mi bf16 values to fp32 in 11 ms, the cast codec's kernel in 1.9 ms.
    """
    whole = values.numel() - values.numel() % CAST_STEP
    if values.dtype == torch.float32 or values.is_cuda:
        whole = 0
    if whole:
        cast = CAST_TO[values.dtype]
        cast.decode_add(values[:whole].view(torch.uint8), total[:whole], torch.float32)
    if whole < values.numel():
        total[whole:].add_(values[whole:])


def settle(residual: Tensor, delivered: Tensor) -> None:
    """Subtract ``delivered`` from ``residual``; set results that are not finite to 0.

    Otherwise an overflow would stay in the residual forever. On a CPU it processes slices that fit
    in a core's cache, so that one pass over memory does both.
    """
    if residual.device.type != "cpu":
        _settle(residual, delivered)
        return
    pairs = zip(torch.split(residual, CACHED), torch.split(delivered, CACHED), strict=True)
    for here, gone in pairs:
        _settle(here, gone)


def _settle(residual: Tensor, delivered: Tensor) -> None:
    # mixed dtypes are slow, see ``add_values``
    if delivered.dtype != torch.float32 and not delivered.is_cuda:
        buffer, wide = POOL.take_fp32(delivered.numel(), delivered.device)
        residual.sub_(wide.copy_(delivered))
        POOL.give(buffer)
    else:
        residual.sub_(delivered)
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def encode_job(
    codec: Coder, job: EncodeRequest, out: Tensor, dtype: torch.dtype, word: Tensor | None = None
) -> int:
    """Encode ``job`` as ``dtype`` into ``out``, fill in its ``decoded``, update its residual.

    Returns the bytes used. With a ``word`` (int64 on the device) it writes the bytes used to
    ``word`` and returns the length of ``out``.
    """
    used = encode_sum(codec, job, out, dtype, word)
    settle_job(codec, job, out[:used], dtype)
    return used


def encode_sum(
    codec: Coder, job: EncodeRequest, out: Tensor, dtype: torch.dtype, word: Tensor | None = None
) -> int:
    """Do the first half of ``encode_job``: encode the values, plus the residual if there is one.

    The residual then holds the sum that was encoded; ``decoded`` is not written yet. If the codec
    does both halves at once with a quantized residual, the job's residual is None afterwards.
    """
    kept, once = job.residual, word is None and dtype == torch.float32
    if once and isinstance(kept, QuantizedResidual) and codec.encode_kept(job.values, kept, out):
        job.residual = None
        return codec.wire_nbytes(job.values.numel(), dtype)
    residual = job.unpacked(kept) if isinstance(kept, QuantizedResidual) else kept
    if residual is not None and job.values is not residual:
        add_values(residual, job.values)
    values = (job.values if residual is None else residual).to(dtype)
    if word is None:
        return codec.encode(values, out)
    assert isinstance(codec, Codec), "only codecs of variable size write words"
    codec.encode_into(values, out, word)
    return out.numel()


def settle_job(codec: Coder, job: EncodeRequest, payload: Tensor, dtype: torch.dtype) -> None:
    """Do the second half of ``encode_job``: decode the payload, subtract it from the residual."""
    kept, decoded, buffer = job.residual, job.decoded, None
    residual = job.unpacked(kept) if isinstance(kept, QuantizedResidual) else kept
    if residual is not None and decoded is None:
        buffer, decoded = POOL.take_fp32(residual.numel(), residual.device)
    if decoded is not None:
        decode_fp32(codec, payload, decoded, dtype)
    if residual is not None and decoded is not None:
        settle(residual, decoded)
    POOL.give(buffer)
    if isinstance(kept, QuantizedResidual):
        job.pack(kept)
