"""Time error-feedback kernels that ``ours`` does not cover: several tensors, tensor slices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench.measure import Work
from benchmarks.gpu_bench.messages import ME, RANKS
from benchmarks.gpu_bench.ours import TENSORS, AllReduce, residual_of
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.base import CollectiveKernel
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.codecs.words import DTYPE_NAMES
from hybridcomp.kernels import KernelSet
from hybridcomp.kernels.pieces import PayloadPiece, PieceFunctions
from hybridcomp.kernels.stretches import PlannedStretch

#: source name of these rows
NAME = "feedback"
#: codec whose sums are encoded, and the bits of its residuals
SUBJECT, BITS = "blockint 4", (8, 4, 16, 32)
#: bytes of one slice's payload
ALIGN = 16


def works(values: Tensor) -> Iterator[Work]:
    """Yield kernels with a residual for each of BITS, then kernels around variable payloads."""
    codec = make_codec("blockint", bits=4)
    fused = codec.fused(values.device)
    for bits in BITS:
        if fused is not None:
            message = AllReduce(SUBJECT, codec, fused, values, bits)
            yield from _sum(message, fused, bits)
            if bits < 32:  # ours.py times fp32 residuals
                yield from message.launches()
        yield from _several(codec, values, bits)
        if values.dtype == torch.float32 and bits < 32:
            yield from _alone(values, bits)
    yield from _pieces(values)


def named(bits: int) -> str:
    """Return the phase name's suffix; fp32 residuals have no number."""
    return "feedback" if bits == 32 else f"feedback {bits}"


def _sum(message: AllReduce, fused: CollectiveKernel, bits: int) -> Iterator[Work]:
    """Sum the received chunks of a reduce-scatter with the residual of this rank's chunk."""
    message.encode()
    out = torch.empty(message.own.numel(), device=message.own.device)
    left = residual_of(bits, out.numel(), out.device)
    run = partial(fused.sum, message.sent, message.own, RANKS, ME, out, left)
    moved = message.sent.nbytes + message.own.nbytes + out.nbytes + 2 * left.nbytes
    wide = 8 * message.slot / message.chunk
    yield Work(SUBJECT, f"sum {named(bits)}", moved, run, wide, f"{RANKS} ranks")


def _several(codec: Codec, values: Tensor, bits: int) -> Iterator[Work]:
    """Encode TENSORS tensors, then TENSORS slices of one tensor; sum the slices of all ranks."""
    each, planned = codec.each(values.device), codec.planned(values.device)
    length = values.numel() // TENSORS // 32 * 32
    if each is None or planned is None or not length:
        return
    numel, note = length * TENSORS, f"{TENSORS} tensors"
    parts = torch.split(values[:numel], length)
    room = -(-codec.wire_nbytes(length, values.dtype) // ALIGN) * ALIGN
    payloads = values.new_empty((RANKS - 1) * room * TENSORS, dtype=torch.uint8)
    mine = payloads[: room * TENSORS]
    residual = residual_of(bits, numel, values.device)
    lefts = [residual[i * length : (i + 1) * length] for i in range(TENSORS)]
    moved, wide = numel * values.itemsize + mine.nbytes + 2 * residual.nbytes, 8 * room / length
    encode = partial(each.encode, parts, torch.split(mine, room), lefts)
    yield Work(SUBJECT, f"encode tensors {named(bits)}", moved, encode, wide, note)
    rows = [PlannedStretch(i * length, length, i * room, i * length) for i in range(TENSORS)]
    table, sums, note = planned.table(rows), planned.table(rows, sums=True), f"{TENSORS} stretches"
    encode = partial(planned.encode, table, values, mine, residual)
    yield Work(SUBJECT, f"encode stretches {named(bits)}", moved, encode, wide, note)
    for sent in torch.split(payloads, room * TENSORS):
        planned.encode(table, values, sent)
    out = torch.empty(numel, device=values.device)
    add = partial(planned.sum, sums, payloads, values[:numel], RANKS, ME, out)
    moved = payloads.nbytes + numel * values.itemsize + out.nbytes
    left = 2 * residual.nbytes
    add_left = partial(add, residual)
    yield Work(SUBJECT, f"sum stretches {named(bits)}", moved + left, add_left, wide, note)
    if isinstance(residual, Tensor):  # run works that do not depend on bits once
        yield Work(SUBJECT, "sum stretches", moved, add, wide, note)
        if values.dtype == torch.float32:
            held = partial(planned.encode, table, None, mine, residual)
            yield Work(SUBJECT, "encode held", mine.nbytes + left, held, wide, note)
            read = partial(each.decode, torch.split(mine, room), torch.split(out, length), add=True)
            nbytes = mine.nbytes + 2 * out.nbytes
            yield Work(SUBJECT, "decode tensors add", nbytes, read, wide, f"{TENSORS} tensors")


def _alone(values: Tensor, bits: int) -> Iterator[Work]:
    """Convert a residual to fp32 and back, without encoding."""
    residual, out = QuantizedResidual(bits, values.numel(), values.device), torch.empty_like(values)
    nbytes = residual.nbytes + values.nbytes
    yield Work("residual", f"store {bits}", nbytes, partial(residual.pack, values), bits)
    yield Work("residual", f"load {bits}", nbytes, partial(residual.unpack, out), bits)


def _pieces(values: Tensor) -> Iterator[Work]:
    """Yield the kernels around variable-size payloads: add values, store a residual, fill."""
    length = values.numel() // TENSORS
    functions: Any = KernelSet[PieceFunctions]("expcode").on(values.device)
    if not hasattr(functions, "on_values") or not length:
        return
    numel, note = length * TENSORS, f"{TENSORS} tensors"
    total, other = torch.zeros(2, numel, device=values.device)
    # kernels hold addresses only; the Work objects keep the tensors alive
    kept = (total, other, values)

    def run(kernel: str, source: Tensor) -> partial[None]:
        rows = [
            PayloadPiece(target.data_ptr(), length, part.data_ptr(), 0)
            for target, part in zip(
                torch.split(total, length), torch.split(source[:numel], length), strict=True
            )
        ]
        return partial(_run, functions, kernel, rows, kept)

    add = run(f"add_{DTYPE_NAMES[values.dtype]}", values)
    yield Work("pieces", "add", (8 + values.itemsize) * numel, add, note=note)
    yield Work("pieces", "settle", 12 * numel, run("settle", other), note=note)
    yield Work("pieces", "fill", 4 * numel, run("fill", other), note=note)


def _run(functions: Any, kernel: str, rows: list[PayloadPiece], kept: object) -> None:
    """Launch ``kernel``; keeps ``kept`` alive during the call."""
    functions.on_values(kernel, rows)
