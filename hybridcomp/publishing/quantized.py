"""Quantize published weights as inference engines do: FP8 in blocks of 128 x 128, and MXFP8.

Each rank quantizes the values that it publishes, with each block's largest magnitude over all
ranks, using the operations of vLLM's ``per_block_cast_to_fp8`` and ``_mxfp8_e4m3_quantize_torch``,
on the device of the weights. Values and scales are published as 16-bit patterns that sort like
them, so that one step of a quantized value is one step of ``stepcode`` (``packed``, ``unpacked``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.job import saved, small_messages
from hybridcomp.job.devices import default_device
from hybridcomp.job.member_groups import shared_member_group
from hybridcomp.publishing.weight_ranges import WeightRange
from hybridcomp.publishing.weights import (
    DTYPES,
    E8M0,
    FP8,
    FP32,
    DividedWeights,
    EngineWeights,
    Held,
    Owned,
)

KEY = "publish.as"
E4M3 = torch.float8_e4m3fn
#: largest magnitude of an FP8 value, and smallest block magnitude that vLLM uses
MOST, LEAST = 448.0, 1e-4
#: kinds whose values take one byte when sent raw
EIGHT = (FP8, E8M0)
#: parts of names of the matrices that engines keep in 16 bits: those of layers that do not
#: multiply by them, of heads, and of expert routing
PLAIN = ("embed", "lm_head", "norm", "router", ".gate.", "_gate.", "wte.", "wpe.", "pos_emb")


@dataclass(frozen=True)
class Form:
    """A quantization: the block that shares a scale, and the scales' name and dtype."""

    rows: int
    columns: int
    suffix: str
    scale: str


FORMS = {"fp8": Form(128, 128, "_scale_inv", FP32), "mxfp8": Form(1, 32, "_scale", E8M0)}


def packed(values: Tensor, kind: str) -> Tensor:
    """Return 16-bit patterns (as bf16) of FP8 values, E8M0 scales or fp32 scales, ordered like the
    values.

    An FP8 value's sign and magnitude become those of its pattern. An fp32 scale takes two patterns,
    in a new last dimension of 2.
    """
    if kind == FP32:
        return values.contiguous().view(torch.int16).view(torch.bfloat16).view(*values.shape, 2)
    codes = values.view(torch.uint8).to(torch.int16)
    if kind == FP8:
        codes = (codes & 0x7F) - (codes & 0x80) * 256
    return codes.view(torch.bfloat16)


def unpacked(patterns: Tensor, kind: str) -> Tensor:
    """Return the input of ``packed``; 16-bit weights are returned as they are."""
    if kind in DTYPES:
        return patterns
    codes = patterns.contiguous().view(torch.int16)
    if kind == FP32:
        return codes.view(torch.float32).squeeze(-1)
    if kind == FP8:
        return ((codes & 0x7F) | ((codes < 0).to(torch.int16) << 7)).to(torch.uint8).view(E4M3)
    return codes.to(torch.uint8)


@dataclass
class QuantizedMatrix:
    """A quantized parameter: its shape and form, and each block's magnitude once measured."""

    shape: tuple[int, int]
    form: Form
    dtype: torch.dtype
    most: Tensor | None = None  # measured magnitude or scale code of each block: (rows, columns)

    @property
    def kind(self) -> torch.dtype:
        """Return the dtype of measurements: fp32 for magnitudes, uint8 for codes of E8M0."""
        return torch.float32 if self.form.scale == FP32 else torch.uint8

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the rows and columns of blocks."""
        rows, columns = self.shape
        return -(-rows // self.form.rows), -(-columns // self.form.columns)

    def rectangles(self, stretch: WeightRange) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield low, row, rows, column, columns of the rectangles that make up a range, in
        order.
        """
        size = self.shape[1]
        if stretch.runs > 1:
            yield 0, stretch.start // size, stretch.runs, stretch.start % size, stretch.length
            return
        at, end = stretch.start, stretch.end
        while at < end:
            row, column = divmod(at, size)
            rows = (end - at) // size if column == 0 else 0
            columns = size if rows else min(size - column, end - at)
            yield at - stretch.start, row, max(rows, 1), column, columns
            at += max(rows, 1) * columns

    def measure(self, stretch: WeightRange, values: Tensor) -> None:
        """Update the blocks' largest magnitudes by the ``values`` of a range."""
        form = self.form
        if self.most is None or self.most.device != values.device:
            self.most = torch.zeros(self.blocks, dtype=self.kind, device=values.device)
        for low, row, rows, column, columns in self.rectangles(stretch):
            some = values[low : low + rows * columns].view(rows, columns)
            top, left = row % form.rows, column % form.columns
            high, wide = (-(-(a + b) // c) for a, b, c in
                          ((top, rows, form.rows), (left, columns, form.columns)))  # fmt: skip
            room = some.new_zeros(high * form.rows, wide * form.columns)
            room[top : top + rows, left : left + columns] = some
            found = room.view(high, form.rows, wide, form.columns).abs().float().amax(dim=(1, 3))
            if form.scale == E8M0:
                found = _e8m0(found)
            first, begin = row // form.rows, column // form.columns
            mine = self.most[first : first + high, begin : begin + wide]
            torch.maximum(mine, found, out=mine)

    def scales(self) -> Tensor:
        """Return the scale of each block as engines load it: fp32, or codes of E8M0."""
        assert self.most is not None, "measured before"
        if self.form.scale == E8M0:
            return self.most
        return self.most.clamp(LEAST) / MOST

    def quantize(self, stretch: WeightRange, values: Tensor) -> Tensor:
        """Return the FP8 values of a range, 1-D."""
        form, scales = self.form, self.scales()
        found = torch.empty(values.numel(), dtype=E4M3, device=values.device)
        for low, row, rows, column, columns in self.rectangles(stretch):
            some = values[low : low + rows * columns].view(rows, columns).float()
            down = torch.arange(row, row + rows, device=values.device) // form.rows
            across = torch.arange(column, column + columns, device=values.device) // form.columns
            mine = scales[down][:, across]
            if form.scale == FP32:
                some = some * (1.0 / mine)
            else:
                some = some / torch.exp2(mine.float() - 127.0)
            found[low : low + rows * columns] = some.to(E4M3).view(-1)
        return found

    def scale_stretch(self, name: str, stretch: WeightRange) -> WeightRange:
        """Return the range of published scales of blocks whose first value is in ``stretch``."""
        form, (_, wide), size = self.form, self.blocks, self.shape[1]
        unit = 2 if form.scale == FP32 else 1
        if stretch.runs > 1:
            row, column = divmod(stretch.start, size)
            first, last = -(-row // form.rows), -(-(row + stretch.runs) // form.rows)
            left, right = (-(-n // form.columns) for n in (column, column + stretch.length))
            start, length, runs = first * wide + left, right - left, last - first
            if runs > 1 and length:
                return WeightRange(name, start * unit, length * unit, runs, wide * unit)
            return WeightRange(name, start * unit, length * unit * (runs > 0))

        def before(position: int) -> int:
            row, column = divmod(position, size)
            if row % form.rows:
                return (row // form.rows + 1) * wide
            return row // form.rows * wide + -(-column // form.columns)

        start = before(stretch.start)
        return WeightRange(name, start * unit, (before(stretch.end) - start) * unit)


def _e8m0(magnitudes: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    biased = torch.ceil(torch.log2(magnitudes.clamp(min=tiny) / MOST)) + 127.0
    return biased.clamp(0, 254).to(torch.uint8)


class Quantizer:
    """The quantized parameters of a job on this rank.

    ``measure`` must be called on all ranks before values of a version are read. In a pipeline, and
    with experts, ``matrices`` differ between ranks.
    """

    def __init__(
        self, matrices: Mapping[str, QuantizedMatrix], form: str, ranks: tuple[int, ...]
    ) -> None:
        self.matrices, self._form, self._ranks = matrices, form, ranks
        self._owned: Sequence[Owned] = ()
        self._every: Mapping[str, QuantizedMatrix] = {}  # of all ranks, in the order of names
        self._group: dist.ProcessGroup | None = None

    def bind(self, divided: DividedWeights) -> None:
        """Store the matrices of all ranks, and the ranges that this rank publishes.

        Called on all ranks together. Raises ConfigError, on all of them, if there is no matrix.
        """
        self._owned = [one for one in divided.owned if one.stretch.name in self.matrices]
        self._every = {
            name: self.matrices.get(name)
            or QuantizedMatrix((shape[0], shape[1]), FORMS[self._form], torch.bfloat16)
            for name, (shape, kind) in divided.table.items() if kind == FP8
        }  # fmt: skip
        if not self._every:
            todo = "no matrix of this model is one that engines quantize; leave it out"
            raise ConfigError(KEY, self._form, todo)
        if len(self._ranks) < dist.get_world_size() and self._group is None:
            self._group = shared_member_group(self._ranks)

    def measure(self) -> None:
        """Find the largest magnitude of each block, over all ranks; a collective."""
        _, problem = saved.attempt(self._measure_mine)
        rows = list(self._every.values())
        device = default_device(self._group)  # that of the values may be the host, on some ranks
        flat = torch.cat([
            torch.zeros(math.prod(row.blocks), dtype=row.kind, device=device)
            if row.most is None else row.most.to(device).reshape(-1) for row in rows
        ])  # fmt: skip
        small_messages.most(flat, self._group)
        parts = torch.split(flat, [math.prod(row.blocks) for row in rows])
        for (name, one), part in zip(self._every.items(), parts, strict=True):
            if name in self.matrices:  # copied, to free those of other ranks
                own = device if one.most is None else one.most.device
                one.most = part.view(one.blocks).to(own, copy=True)
        if problem is not None:
            raise PublishError(problem)

    def _measure_mine(self) -> None:
        for matrix in self.matrices.values():
            matrix.most = None
        for owned in self._owned:
            matrix = self.matrices[owned.stretch.name]
            # in pieces, so that a partition of a large matrix needs no second copy
            for low, high in owned.stretch.pieces(max(1 << 23, matrix.shape[1] * 128)):
                values = _values(owned.held, owned.low + low, owned.low + high, matrix.dtype)
                matrix.measure(owned.stretch.cut(low, high), values)

    def of(self, held: Held) -> list[Held]:
        """Return what is published for a quantized range: its values and its scales."""
        name = held.stretch.name
        matrix = self.matrices[name]
        scale_name = name + matrix.form.suffix
        scales = matrix.scale_stretch(scale_name, held.stretch)
        own = replace(held, part=functools.partial(self._part, matrix, held))
        if not scales.numel:
            return [own]
        part = functools.partial(self._scales, matrix, scales)
        return [own, Held(scales, held.read, part=part)]

    def _part(self, matrix: QuantizedMatrix, held: Held, low: int, high: int) -> Tensor:
        values = _values(held, low, high, matrix.dtype)
        return packed(matrix.quantize(held.stretch.cut(low, high), values), FP8)

    def _scales(self, matrix: QuantizedMatrix, stretch: WeightRange, low: int, high: int) -> Tensor:
        flat = packed(matrix.scales(), matrix.form.scale).reshape(-1)
        return stretch.cut(low, high).of(flat).reshape(-1)


def _values(held: Held, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return held.read().detach().reshape(-1)[low:high].to(dtype)


def quantized(weights: EngineWeights, form: str | None, dtype: str | None) -> EngineWeights:
    """Return ``weights`` with the matrices that engines quantize as FP8 values and scales.

    Args:
        weights: weights under checkpoint names.
        form: one of FORMS; None: unquantized.
        dtype: dtype to which weights that are not 16-bit are rounded before quantizing.

    Raises ConfigError on another form, and on weights that are cut across blocks; ``bind`` raises
    it if no rank has such a matrix.
    """
    if form is None or weights.refused is not None:
        return weights
    if form not in FORMS:
        raise ConfigError(KEY, form, f"expected one of {', '.join(FORMS)}, or nothing")
    found = FORMS[form]
    matrices = {}
    for name, shape in weights.shapes.items():
        if not is_quantized(name, shape) or shape[1] % found.columns and form == "mxfp8":
            continue
        own = weights.dtypes[name]
        rounded = own if own in DTYPES.values() else DTYPES.get(str(dtype), torch.bfloat16)
        matrices[name] = QuantizedMatrix((shape[0], shape[1]), found, rounded)
    for held in weights.held:
        one = held.stretch
        size = matrices[one.name].shape[1] if one.name in matrices else 0
        if size and one.runs > 1 and (one.stride != size or one.start % size + one.length > size):
            todo = f"{one.name} is cut into rows of {one.length} every {one.stride}: leave it out"
            raise ConfigError(KEY, form, todo)
    quantizer = Quantizer(matrices, form, weights.ranks)
    parts = [new for old in weights.held
             for new in (quantizer.of(old) if old.stretch.name in matrices else [old])]  # fmt: skip
    shapes, kinds = dict(weights.shapes), dict.fromkeys(matrices, FP8)
    dtypes = dict(weights.dtypes)
    for name, matrix in matrices.items():
        scale = name + found.suffix
        shapes[scale] = (*matrix.blocks, 2) if found.scale == FP32 else matrix.blocks
        kinds[scale], dtypes[scale] = found.scale, matrix.dtype
    return replace(
        weights, shapes=shapes, dtypes=dtypes, held=parts, kinds=kinds, quantizer=quantizer
    )


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return whether engines quantize this parameter: matrices of layers that multiply."""
    return len(shape) == 2 and name.endswith(".weight") and not any(one in name for one in PLAIN)
