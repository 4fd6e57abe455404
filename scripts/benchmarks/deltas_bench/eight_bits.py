"""Bits of a trace whose matrices are published as FP8 or MXFP8 (``publish.as``)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.deltas_bench.traces import Trace
from hybridcomp.codecs import StepCode
from hybridcomp.publishing.quantized import FORMS, QuantizedMatrix, packed
from hybridcomp.publishing.stretches import WeightRange
from hybridcomp.publishing.weights import E8M0, FP8

CODEC = StepCode()


def patterns(values: Tensor, shape: tuple[int, int], form: str) -> tuple[Tensor, Tensor]:
    """Return the patterns of a matrix's values and of its scales, 1-D."""
    matrix = QuantizedMatrix(shape, FORMS[form], values.dtype)
    whole = WeightRange("", 0, values.numel())
    matrix.measure(whole, values)
    scales = packed(matrix.scales(), matrix.form.scale).reshape(-1)
    return packed(matrix.quantize(whole, values), FP8), scales


def coded_bits(values: Tensor, reference: Tensor | None, width: int = 16) -> int:
    """Return the bits of a payload, or of values of ``width`` as they are where that is less."""
    room = torch.empty(CODEC.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    return min(8 * CODEC.encode(values.contiguous(), reference, room), width * values.numel())


def eight_bits(trace: Trace) -> dict[str, float]:
    """Return bits a weight of the trace's matrices: full versions and changes, by form."""
    found: dict[str, float] = {}
    sizes = [torch.Size(shape).numel() for shape in trace.shapes]
    after, before = (torch.split(one, sizes) for one in (trace.values, trace.reference))
    rows = [(now, old, shape) for now, old, shape in zip(after, before, trace.shapes, strict=True)
            if len(shape) == 2 and shape[1] % 32 == 0]  # fmt: skip
    numel = sum(now.numel() for now, _, _ in rows)
    found["bf16, full"] = sum(coded_bits(now, None) for now, _, _ in rows) / numel
    found["bf16"] = sum(coded_bits(now, old) for now, old, _ in rows) / numel
    for form in FORMS:
        full = changes = changed = 0
        for now, old, shape in rows:
            new_ones = patterns(now, (shape[0], shape[1]), form)
            old_ones = patterns(old, (shape[0], shape[1]), form)
            widths = (8, 8 if FORMS[form].scale == E8M0 else 16)
            for new, held, width in zip(new_ones, old_ones, widths, strict=True):
                full += coded_bits(new, None, width)
                is_same = torch.equal(new.view(torch.int16), held.view(torch.int16))
                changes += 0 if is_same else coded_bits(new, held.contiguous(), width)
            changed += int((new_ones[0].view(torch.int16) != old_ones[0].view(torch.int16)).sum())
        found[f"{form}, full"] = full / numel
        found[form] = changes / numel
        found[f"{form}, changed"] = changed / numel
    return found
