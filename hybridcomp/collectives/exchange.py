"""Payloads between ranks: encode, exchange the bytes, hand out views of what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import PAYLOAD_ALIGN, VALUE_DTYPES, Codec
from hybridcomp.collectives import transport
from hybridcomp.collectives.buffers import POOL
from hybridcomp.collectives.handle import Steps
from hybridcomp.collectives.meter import Meter
from hybridcomp.errors import CodecError

#: what reads 16-bit values as they lie in memory; a payload of so many is of PAYLOAD_ALIGN bytes
WIDEN = {torch.bfloat16: make_codec("bf16"), torch.float16: make_codec("fp16")}
CAST_STEP = PAYLOAD_ALIGN // 2
SIZE_NBYTES = 8  # sizes of variable-size payloads travel as int64


@dataclass(eq=False)
class Job:
    """One stretch of values to encode; the same job may go to several ranks, as the same bytes.

    With a ``residual`` (fp32) ``values + residual`` is sent and the residual becomes what the
    encoding left out. ``residual is values`` means that the sum stands there already.
    """

    values: Tensor
    residual: Tensor | None = None


@dataclass
class Payloads:
    """Views into the wire buffers of one exchange; ``release`` ends their life."""

    received: list[list[Tensor]]  # by group rank, then in the order of that rank's jobs
    encoded: dict[Job, Tensor]  # own payloads
    buffers: list[Tensor] = field(default_factory=list)

    def release(self) -> None:
        """Give the wire buffers back."""
        POOL.give(*self.buffers)


def check_values(name: str, tensor: Tensor) -> None:
    """Raise CodecError unless ``tensor`` is 1-D, contiguous and of a dtype that travels encoded."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in VALUE_DTYPES:
        raise CodecError(
            f"{name}: expected a 1-D contiguous tensor of {VALUE_DTYPES}, found "
            f"shape {tuple(tensor.shape)}, {tensor.dtype}, contiguous={tensor.is_contiguous()}"
        )


def check_residual(name: str, residual: Tensor | None, numel: int) -> None:
    """Raise CodecError unless ``residual`` is None or a flat fp32 tensor of ``numel`` elements."""
    if residual is None:
        return
    check_values(name, residual)
    if residual.dtype != torch.float32 or residual.numel() != numel:
        raise CodecError(
            f"{name}: expected {numel} torch.float32 elements, found {residual.numel()} "
            f"{residual.dtype} elements"
        )


def sent_dtype(codec: Codec, dtype: torch.dtype, wide: bool) -> torch.dtype:
    """The dtype that is encoded: values of ``dtype``, or fp32 ones (``wide``) meant for ``dtype``.

    A lossy codec takes fp32 as it is, which saves a rounding and a pass. A lossless one would
    carry twice the bytes for digits that ``dtype`` cannot hold.
    """
    return torch.float32 if wide and not codec.lossless else dtype


def decode_fp32(codec: Codec, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Decode values of ``dtype`` into fp32 ``out``; lossless codecs do not decode across dtypes."""
    if codec.lossless and dtype != torch.float32:
        out.zero_()
        codec.decode_add(payload, out, dtype)
    else:
        codec.decode(payload, out)


def add_values(total: Tensor, values: Tensor) -> None:
    """``total += values``, fp32 += fp32/bf16/fp16.

    On one core torch adds 4 Mi bf16 to fp32 values in 11 ms, and the kernel of the cast in 1.9 ms.
    """
    whole = values.numel() - values.numel() % CAST_STEP
    if values.dtype == torch.float32 or values.is_cuda:
        whole = 0
    if whole:
        cast = WIDEN[values.dtype]
        cast.decode_add(values[:whole].view(torch.uint8), total[:whole], torch.float32)
    if whole < values.numel():
        total[whole:].add_(values[whole:])


def settle(residual: Tensor, delivered: Tensor) -> None:
    """``residual -= delivered``, 0 where that is not finite: an overflow must not stay for ever."""
    if delivered.dtype != torch.float32 and not delivered.is_cuda:  # slow if mixed: ``add_values``
        buffer, wide = POOL.take_fp32(delivered.numel(), delivered.device)
        residual.sub_(wide.copy_(delivered))
        POOL.give(buffer)
    else:
        residual.sub_(delivered)
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def encode_job(codec: Codec, job: Job, out: Tensor, dtype: torch.dtype) -> int:
    """Encode ``job`` as ``dtype`` into ``out`` and update its residual; returns the bytes used."""
    if job.residual is None:
        return codec.encode(job.values.to(dtype), out)
    residual = job.residual
    if job.values is not residual:
        add_values(residual, job.values)
    used = codec.encode(residual.to(dtype), out)
    buffer, decoded = POOL.take_fp32(residual.numel(), residual.device)
    decode_fp32(codec, out[:used], decoded, dtype)
    settle(residual, decoded)
    POOL.give(buffer)
    return used


def encode_all(
    codec: Codec, stretches: Sequence[Tensor], out: Tensor, dtype: torch.dtype
) -> list[int]:
    """Encode ``stretches`` as ``dtype`` into ``out``, one after the other; the bytes of each."""
    used: list[int] = []
    for values in stretches:
        used.append(codec.encode(values.to(dtype), out[sum(used) :]))
    return used


def show_overflow(total: Tensor, dtype: torch.dtype) -> None:
    """Make Inf (in place) of sums that ``dtype`` would round to Inf, as they come out natively.

    Codecs saturate when they narrow what they decoded, and loss scaling lives on overflows.
    """
    if dtype == torch.float16:
        total.copy_(torch.where(total.half().isinf(), total.half().float(), total))


def exchange(
    codec: Codec,
    dtype: torch.dtype,
    jobs: Sequence[Sequence[Job]],
    numels: Sequence[Sequence[int]],
    device: torch.device,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[Payloads]:
    """All-to-all of payloads.

    Args:
        jobs: per group rank, what to send there; empty for this rank itself.
        numels: per group rank, the elements of each job that comes from there.
        dtype: what is encoded, on all ranks.

    1 encode every job once, into slots that follow each other by destination
    2 variable-size codecs: exchange the sizes
    3 exchange the bytes
    """
    # 1
    capacity = sum(codec.wire_nbytes(j.values.numel(), dtype) for row in jobs for j in row)
    send_buffer = POOL.take(capacity, device)
    with meter.coding():
        encoded, sizes = _encode(codec, dtype, jobs, send_buffer)
    # 2
    if codec.fixed_size:
        arriving = [[codec.wire_nbytes(n, dtype) for n in row] for row in numels]
    else:
        arriving = yield from _exchange_sizes(sizes, numels, device, group, meter)
    # 3
    in_splits = [sum(row) for row in sizes]
    out_splits = [sum(row) for row in arriving]
    recv_buffer = POOL.take(sum(out_splits), device)
    meter.sent_each(in_splits)
    yield from transport.all_to_all(
        recv_buffer[: sum(out_splits)],
        send_buffer[: sum(in_splits)],
        out_splits,
        in_splits,
        group,
    )
    return Payloads(_cut(recv_buffer, arriving), encoded, [send_buffer, recv_buffer])


def _encode(
    codec: Codec, dtype: torch.dtype, jobs: Sequence[Sequence[Job]], out: Tensor
) -> tuple[dict[Job, Tensor], list[list[int]]]:
    """Encode into ``out``; returns the payload of each job and the sizes by destination."""
    encoded: dict[Job, Tensor] = {}
    sizes: list[list[int]] = []
    position = 0
    for row in jobs:
        sizes.append([])
        for job in row:
            if job in encoded:
                used = encoded[job].numel()
                out[position : position + used].copy_(encoded[job])
            else:
                room = codec.wire_nbytes(job.values.numel(), dtype)
                used = encode_job(codec, job, out[position : position + room], dtype)
                assert used <= room, f"{codec} wrote more than its wire_nbytes"
                encoded[job] = out[position : position + used]
            sizes[-1].append(used)
            position += used
    return encoded, sizes


def _exchange_sizes(
    sizes: list[list[int]],
    numels: Sequence[Sequence[int]],
    device: torch.device,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[list[list[int]]]:
    mine = torch.tensor([size for row in sizes for size in row], dtype=torch.int64, device=device)
    counts = [len(row) for row in numels]
    theirs = torch.empty(sum(counts), dtype=torch.int64, device=device)
    meter.sent_each([SIZE_NBYTES * len(row) for row in sizes])
    yield from transport.all_to_all(theirs, mine, counts, [len(row) for row in sizes], group)
    flat = theirs.tolist()
    ends = list(accumulate(counts))
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _cut(buffer: Tensor, sizes: list[list[int]]) -> list[list[Tensor]]:
    """Views of ``buffer``, laid out by row."""
    rows: list[list[Tensor]] = []
    position = 0
    for row in sizes:
        rows.append([])
        for size in row:
            rows[-1].append(buffer[position : position + size])
            position += size
    return rows


def gather(
    codec: Codec,
    dtype: torch.dtype,
    payload: Tensor,
    used: Sequence[int],
    numels: Sequence[Sequence[int]],
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """All-gather the payloads of every rank: ``(payloads by rank, buffer to give back)``.

    Args:
        payload: the encoded payloads of this rank, one after the other, of ``used`` bytes each;
            room for ``gather_capacity`` bytes.
        numels: by rank, the elements behind each of its payloads.

    Every rank's slot is as long as the longest. Variable-size codecs exchange the sizes first.
    """
    me, world_size, device = get_rank(group), len(numels), payload.device
    sizes = [[codec.wire_nbytes(numel, dtype) for numel in row] for row in numels]
    if not codec.fixed_size:
        most = max(len(row) for row in numels)
        mine = torch.tensor([*used, *[0] * (most - len(used))], dtype=torch.int64, device=device)
        theirs = torch.empty(world_size * most, dtype=torch.int64, device=device)
        meter.sent_around(SIZE_NBYTES * most, me, world_size)
        yield from transport.all_gather(theirs, mine, group)
        rows = theirs.view(world_size, most).tolist()
        sizes = [row[: len(known)] for row, known in zip(rows, numels, strict=True)]
    slot = max(sum(row) for row in sizes)
    buffer = POOL.take(world_size * slot, device)
    meter.sent_around(slot, me, world_size)
    yield from transport.all_gather(buffer[: world_size * slot], payload[:slot], group)
    slots = [[*row, slot - sum(row)] for row in sizes]
    return [row[:-1] for row in _cut(buffer, slots)], buffer


def gather_capacity(codec: Codec, dtype: torch.dtype, numels: Sequence[Sequence[int]]) -> int:
    """Most bytes that any rank's payloads may take in ``gather``."""
    return max(sum(codec.wire_nbytes(numel, dtype) for numel in row) for row in numels)
