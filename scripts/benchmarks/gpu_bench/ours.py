"""hybridcomp's codecs as works to time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench.measure import Work, cuda
from benchmarks.gpu_bench.messages import ME, RANKS, Messages, group_without_wire
from hybridcomp.codecs import Codec, StepCode, make_codec
from hybridcomp.codecs.base import CollectiveKernel
from hybridcomp.codecs.exact_steps import typical_steps
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.codecs.stepcode import STEP_DTYPES

#: tensors in a coalesced message of parameters
TENSORS = 64
#: row name of stepcode
STEPS = "stepcode"


def codecs() -> dict[str, Codec]:
    """Return the codecs of the table by the names of their rows."""
    return {
        "blockint 8": make_codec("blockint", bits=8),
        "blockint 4": make_codec("blockint", bits=4),
        "blockint 4, gaussian": make_codec("blockint", bits=4, levels="gaussian"),
        "blockint 4, lloyd": make_codec("blockint", bits=4, levels="lloyd"),
        "blockint 4, rotate": make_codec("blockint", bits=4, rotate=True),
        "fp8": make_codec("fp8"),
        "fp8 e5m2": make_codec("fp8", format="e5m2"),
        "bf16": make_codec("bf16"),
        "fp16": make_codec("fp16"),
        "zfp 8": make_codec("zfp", rate=8),
        "zfp 16": make_codec("zfp", rate=16),
        "mpc": make_codec("mpc"),
        "expcode": make_codec("expcode"),
        "radix 1e-2": make_codec("radix", error_bound=1e-2),
        "radix 1e-3": make_codec("radix", error_bound=1e-3),
        "topk": make_codec("topk"),
    }


def works(values: Tensor, *, name: str, codec: Codec) -> Iterator[Work]:
    """Yield encode, decode and decode-add; for blockint also the kernels of an all_reduce."""
    raw, numel = values.nbytes, values.numel()
    room = values.new_empty(codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8)
    used = codec.encode(values, room)
    payload, out = room[:used], torch.empty_like(values)
    total = values.new_zeros(numel, dtype=torch.float32)
    bits = 8 * used / numel
    yield Work(name, "encode", raw + used, _encoder(codec, values, room), bits)
    codec.encode(values, room)
    yield Work(name, "decode", raw + used, lambda: codec.decode(payload, out), bits)
    yield Work(
        name,
        "decode_add",
        used + 2 * total.nbytes,
        lambda: codec.decode_add(payload, total, values.dtype),
        bits,
    )
    yield from _tensors(name, codec, values)
    fused = codec.fused(values.device)
    if fused is not None:
        for feedback in (0, 32):
            yield from AllReduce(name, codec, fused, values, feedback).works()


def steps(values: Tensor) -> Iterator[Work]:
    """Yield stepcode of 16-bit values after a typical step, relative to the values before it."""
    if values.dtype not in STEP_DTYPES:
        return
    codec, numel, moved = StepCode(), values.numel(), typical_steps(values)
    room = values.new_empty(codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8)
    used = codec.encode(moved, values, room)
    payload, out = room[:used].clone(), torch.empty_like(values)
    size = torch.zeros(1, dtype=torch.int64, device=values.device)
    nbytes, bits = 2 * values.nbytes + used, 8 * used / numel
    encode = partial(codec.encode_into, moved, values, room, size)
    yield Work(STEPS, "encode", nbytes, encode, bits)
    yield Work(STEPS, "decode", nbytes, partial(codec.decode, payload, values, out), bits)


def _tensors(name: str, codec: Codec, values: Tensor) -> Iterator[Work]:
    """Yield coding of TENSORS tensors, a payload each: in one launch, then a launch per tensor."""
    length = values.numel() // TENSORS
    each: Any = codec.each(values.device) or codec.pieces(values.device)
    if each is None or not length:
        return
    parts = torch.split(values[: length * TENSORS], length)
    room = codec.wire_nbytes(length, values.dtype)
    rooms = torch.split(values.new_empty(room * TENSORS, dtype=torch.uint8), room)
    sizes = torch.full((TENSORS,), room, device=values.device)
    out = torch.split(torch.empty_like(values)[: length * TENSORS], length)

    def one_by_one() -> None:
        for part, slot, size in zip(parts, rooms, torch.split(sizes, 1), strict=True):
            if codec.fixed_size:
                codec.encode(part, slot)
            else:
                codec.encode_into(part, slot, size)

    one_by_one()
    nbytes, note = int(sizes.sum()), f"{TENSORS} tensors"
    moved, bits = nbytes + sum(part.nbytes for part in parts), 8 * nbytes / (length * TENSORS)
    last = () if codec.fixed_size else (sizes,)
    yield Work(name, "encode tensors", moved, lambda: each.encode(parts, rooms, *last), bits, note)
    yield Work(name, "decode tensors", moved, lambda: each.decode(rooms, out), bits, note)
    yield Work(name, "encode one by one", moved, one_by_one, bits, f"{note}, one by one")
    if not codec.fixed_size:
        totals = torch.split(values.new_zeros(length * TENSORS, dtype=torch.float32), length)
        rows = [[slot] * (RANKS - 1) for slot in rooms]
        moved = (RANKS - 1) * nbytes + 8 * length * TENSORS
        add = partial(each.add, rows, totals, values.dtype)
        yield Work(name, "sum tensors", moved, add, bits, f"{note}, {RANKS} ranks")


def _encoder(codec: Codec, values: Tensor, room: Tensor) -> Callable[[], object]:
    """Return an encode call as in collectives: sizes stay on the GPU, the host does not wait."""
    if codec.fixed_size:
        return lambda: codec.encode(values, room)
    size = torch.zeros(1, dtype=torch.int64, device=values.device)
    return lambda: codec.encode_into(values, room, size)


def residual_of(bits: int, numel: int, device: torch.device) -> Tensor | QuantizedResidual:
    """Return a zero residual of error feedback with ``bits`` per value."""
    if bits < 32:
        return QuantizedResidual(bits, numel, device)
    return torch.zeros(numel, device=device)


class AllReduce:
    """The three launches of an all_reduce of ``values`` over RANKS ranks, without sending.

    This rank's payloads stand in for received ones of the same size. ``bits``: bits of a residual
    value, 32 for fp32, 0 without error feedback.
    """

    def __init__(
        self, name: str, codec: Codec, fused: CollectiveKernel, values: Tensor, bits: int
    ) -> None:
        self.name, self.codec, self.fused, self.values = name, codec, fused, values
        self.chunk = -(-values.numel() // RANKS // 32) * 32
        self.own = values[ME * self.chunk :][: self.chunk]
        self.slot = codec.wire_nbytes(self.chunk, values.dtype)
        self.sent = values.new_zeros((RANKS - 1) * self.slot, dtype=torch.uint8)
        self.payload = values.new_zeros(self.slot, dtype=torch.uint8)
        self.gathered = values.new_zeros(RANKS * self.slot, dtype=torch.uint8)
        self.out = torch.empty_like(values)
        self.residual, self.owner_residual = (
            residual_of(bits, numel, values.device) if bits else None
            for numel in (values.numel(), self.own.numel())
        )
        few = f" {bits}" if 0 < bits < 32 else ""
        self.feedback = f" feedback{few}" if bits else ""

    def encode(self) -> None:
        """Encode all chunks but this rank's."""
        self.fused.encode(self.values, self.chunk, self.slot, ME, self.sent, self.residual)

    def reduce(self) -> None:
        """Decode, sum and encode: the target "decode-sum-encode"."""
        mine = slice(ME * self.chunk, ME * self.chunk + self.own.numel())
        left = None if self.residual is None else self.residual[mine]
        self.fused.reduce(self.sent, self.own, RANKS, ME, self.payload, left, self.owner_residual)

    def decode(self) -> None:
        """Decode all chunks."""
        self.fused.decode(self.gathered, self.chunk, self.slot, self.out)

    def all(self) -> None:
        """Encode, sum and decode the whole message."""
        self.encode()
        self.reduce()
        self.gathered.view(RANKS, self.slot)[ME].copy_(self.payload)
        self.decode()

    def works(self) -> Iterator[Work]:
        """Yield each launch, all three together (also as a CUDA graph), and whole collectives."""
        encode, reduce, decode = yield from self.launches()
        everything = encode + reduce + decode
        bits, note = 8 * self.slot / self.chunk, f"{RANKS} ranks"
        if not self.feedback:
            yield Work(self.name, "chunks decode", decode, self.decode, bits, note)
        phase, launches = f"all_reduce{self.feedback}", f"{note}, 3 launches"
        yield Work(self.name, phase, everything, self.all, bits, launches)
        if self.values.is_cuda:
            graph = cuda.CUDAGraph()
            with cuda.graph(graph):
                self.all()
            yield Work(self.name, f"{phase} graph", everything, graph.replay, bits, note)
        yield from self._paths(encode, reduce, decode, bits)

    def launches(self) -> Generator[Work, None, tuple[int, int, int]]:
        """Yield the encode and the sum launch; return the bytes moved by encode, sum and decode."""
        self.all()
        self.gathered.view(RANKS, self.slot)[:] = self.payload
        share = self.own.nbytes
        encode = self.values.nbytes - share + self.sent.nbytes
        reduce = self.sent.nbytes + share + self.slot
        decode = self.gathered.nbytes + self.out.nbytes
        if self.residual is not None and self.owner_residual is not None:
            kept = self.owner_residual.nbytes
            encode += 2 * (self.residual.nbytes - kept)
            reduce += 4 * kept  # this rank's chunk of the first residual is read and zeroed too
        bits, note = 8 * self.slot / self.chunk, f"{RANKS} ranks"
        yield Work(self.name, f"chunks encode{self.feedback}", encode, self.encode, bits, note)
        yield Work(self.name, f"sum_encode{self.feedback}", reduce, self.reduce, bits, note)
        return encode, reduce, decode

    def _paths(self, encode: int, reduce: int, decode: int, bits: float) -> Iterator[Work]:
        """Yield whole collectives as channels send them, with the bytes of each launch."""
        share, note = self.own.nbytes, f"{RANKS} ranks"
        moved = {
            "all_gather": share + self.slot + decode,
            "reduce_scatter": encode + reduce - self.slot + 4 * self.own.numel(),
            "all_to_all": encode + decode + share - self.slot,
            "all_to_all uneven": encode + decode + share - self.slot,
        }
        with group_without_wire():
            for kind, run in Messages(self.codec, self.values).kinds().items():
                if (self.residual is not None) == kind.endswith("feedback"):
                    nbytes = moved.get(kind, encode + reduce + decode)
                    yield Work(self.name, f"{kind} path", nbytes, run, bits, note)
