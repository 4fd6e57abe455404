"""Count the bits that other models of a step would take: contexts beside the old exponent.

Bits are those of the format's symbols given the context, of their extra bits, and of the model, 3
bytes for each symbol of each context; that is what an encoder with this model would send. What it
would take beside (memory for the last step on both sides, tables of as many contexts in a decoder's
cache) is not in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.deltas_bench.bits import Numbers, steps
from benchmarks.deltas_bench.traces import Trace

Reals = NDArray[np.float64]
#: exponents that have a context of their own
EXPONENTS = 16
#: symbols of the format: 32 steps as they are, then 4 for each power of two; a flip's bits follow
DIRECT, SYMBOLS, FLIP = 32, 128, 127
#: bits of a symbol in the model
LISTED = 24


def symbols_of(moved: Numbers) -> tuple[Numbers, Numbers]:
    """Return symbols and the number of extra bits of steps, as stepcode has them."""
    z = np.where(moved < 0, -2 * moved - 1, 2 * moved)
    power = np.log2(np.maximum(z, 1)).astype(np.int64)
    quarter = z >> np.maximum(power - 2, 0) & 3
    large = DIRECT + 4 * (power - 5) + quarter
    symbols = np.where(z < DIRECT, z, np.minimum(large, FLIP))
    extra = np.where(z < DIRECT, 0, power - 2)
    return symbols, np.where(symbols == FLIP, 16, extra)


def bits_given(symbols: Numbers, extra: Numbers, context: Numbers) -> float:
    """Return bits a value of symbols with their frequencies in each context, model included."""
    counts = np.bincount(context * SYMBOLS + symbols, minlength=(int(context.max()) + 1) * SYMBOLS)
    table = counts.reshape(-1, SYMBOLS).astype(np.float64)
    totals = table.sum(1)
    seen = table[table > 0]
    total = -(seen * np.log2(seen)).sum() + (totals[totals > 0] * np.log2(totals[totals > 0])).sum()
    return float((total + extra.sum() + LISTED * len(seen)) / len(symbols))


def contexts(
    trace: Trace, exponents: Numbers, moved: Numbers
) -> Iterator[tuple[str, Numbers, int]]:
    """Yield ways to divide the values of each exponent: name, class of each value, classes."""
    old = trace.reference.view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    last = steps(trace.before, trace.reference)[1]
    size = np.abs(moved) * np.exp2(exponents - exponents.max(), dtype=np.float64)
    yield "the exponent (stepcode)", np.zeros_like(exponents), 1
    yield "one bit of the mantissa", old >> 6 & 1, 2
    yield "two bits of the mantissa", old >> 5 & 3, 4
    yield "the sign of the weight", old >> 15, 2
    kinds = trace.kinds.numpy().astype(np.int64)
    yield "the kind of the tensor", kinds, int(kinds.max()) + 1
    before = _by_blocks(moved.astype(np.float64), 32, 1)
    yield "where the 32 weights before went", np.digitize(before, (-0.2, 0.2)), 3
    yield "how far the 32 weights before went", _quarters(_by_blocks(size, 32, 1)), 4
    yield "how far its 512 weights go, told", _quarters(_by_blocks(size, 512, 0)), 4
    yield "where it went in the last step", np.clip(last, -1, 1) + 1, 3
    yield "its last step, up to 2", np.clip(last, -2, 2) + 2, 5
    yield "its last step, up to 12", np.clip(last, -12, 12) + 12, 25


def _by_blocks(values: Reals, length: int, back: int) -> Reals:
    """Return for each value the mean of its block, or of the one ``back`` before."""
    padded = np.pad(values, (0, -len(values) % length))
    means = np.roll(padded.reshape(-1, length).mean(1), back)
    return np.repeat(means, length)[: len(values)]


def _quarters(values: Reals) -> Numbers:
    """Return the quarter of all values that each is in, 0 to 3."""
    return np.digitize(values, np.quantile(values[::37], (0.25, 0.5, 0.75)))


def models(trace: Trace) -> dict[str, float]:
    """Return bits a value with each model."""
    exponents, moved = steps(trace.reference, trace.values)
    symbols, extra = symbols_of(moved)
    lowest = int(np.bincount(exponents).argmax()) - 11
    row = np.clip(exponents - lowest, 0, EXPONENTS - 1)
    found = {}
    for name, classes, count in contexts(trace, exponents, moved):
        found[name] = bits_given(symbols, extra, row * count + classes)
        if name.endswith("told"):
            found[name] += 2 / 512
    return found
