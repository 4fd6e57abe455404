"""Curves of bits against error, compared at equal error, and the tables printed of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.distortion.peers import PEERS, Point, codec_point, cuszp_point
from hybridcomp.codecs import Radix, make_codec

BOUNDS = tuple(2.0 ** (-k / 2) for k in range(2, 27))
#: relative L2 errors between which codecs are compared
WORST, BEST = 0.2, 1.5e-3
#: settings of blockint for 4 bits and fewer
VARIANTS: dict[str, dict[str, object]] = {
    "int4": {"bits": 4},
    "int4 rot": {"bits": 4, "rotate": True},
    "int4 gauss": {"bits": 4, "levels": "gaussian"},
    "int4 rot gauss": {"bits": 4, "rotate": True, "levels": "gaussian"},
    "int3": {"bits": 3},
    "int3 rot": {"bits": 3, "rotate": True},
    "int2": {"bits": 2},
    "int2 rot": {"bits": 2, "rotate": True},
}
Curves = dict[str, list[Point]]


def radix_curve(values: Tensor, segment: int | None) -> list[Point]:
    """radix at every bound; without a segment one step for the whole tensor."""
    if segment:
        return [codec_point(Radix(bound, segment), values) for bound in BOUNDS]
    absmax = float(values.abs().max())
    return [codec_point(Radix(bound * absmax, mode="abs"), values) for bound in BOUNDS]


def curves_of(values: Tensor) -> Curves:
    """Every codec on one tensor."""
    curves = {
        "radix": radix_curve(values, 4096),
        "radix seg 256": radix_curve(values, 256),
        "radix tensor": radix_curve(values, None),
        "cuSZp fixed": [cuszp_point(values, bound, 4096) for bound in BOUNDS],
        "blockint": [codec_point(make_codec("blockint", bits=b), values) for b in range(2, 9)],
        **{
            name: [codec_point(make_codec("blockint", **settings), values)]
            for name, settings in VARIANTS.items()
        },
        "zfp": [codec_point(make_codec("zfp", rate=rate / 2), values) for rate in range(8, 33)],
        "fp8 e4m3": [codec_point(make_codec("fp8", format="e4m3"), values)],
        "fp8 e5m2": [codec_point(make_codec("fp8", format="e5m2"), values)],
    }
    return curves | {name: [peer(values)] for name, peer in PEERS.items()}


def bits_at(curve: Sequence[Point], error: float) -> float:
    """Bits at a relative L2 error, linear in its logarithm; beyond the ends the last slope."""
    points = sorted({e: b for b, e in reversed(curve) if e > 0}.items())
    logs, bits = [math.log2(e) for e, _ in points], [b for _, b in points]
    x = math.log2(error)
    k = next((k for k in range(1, len(logs) - 1) if logs[k] >= x), len(logs) - 1)
    slope = (bits[k] - bits[k - 1]) / (logs[k] - logs[k - 1])
    return bits[k] + slope * (x - logs[k])


def extra_bits(curves: Curves, name: str) -> float:
    """Mean of what ``name`` needs beyond radix at the errors of its own points."""
    points = [point for point in curves[name] if BEST <= point[1] <= WORST]
    if not points:
        return math.nan
    return statistics.mean(bits - bits_at(curves["radix"], error) for bits, error in points)


def mean(cells: Sequence[float]) -> float:
    """Mean of what is there."""
    found = [cell for cell in cells if not math.isnan(cell)]
    return statistics.mean(found) if found else math.nan


def print_table(
    title: str, columns: Sequence[str], rows: dict[str, list[float]], digits: int = 2
) -> None:
    """Rows of numbers, their mean last."""
    print(f"\n{title}\n{'':16}" + "".join(f"{column:>12}" for column in (*columns, "mean")))
    for name, cells in rows.items():
        print(f"{name:16}" + "".join(f"{cell:>12.{digits}f}" for cell in (*cells, mean(cells))))


def lossy_tables(curves: dict[str, Curves], dense: Sequence[str]) -> dict[str, list[float]]:
    """Print bits at three errors and the extra bits; returns the extra bits."""
    names = list(next(iter(curves.values())))
    swept = [name for name in names if len(curves[dense[0]][name]) > 1]
    for error in (1e-1, 2e-2, 5e-3):
        print_table(
            f"bits per value at relative L2 {error:g}",
            list(curves),
            {name: [bits_at(c[name], error) for c in curves.values()] for name in swept},
        )
    extra = {name: [extra_bits(curves[c], name) for c in dense] for name in names}
    print_table("bits per value more than radix at its own error, dense classes", dense, extra)
    return extra


def variant_table(curves: dict[str, Curves]) -> None:
    """What rotation and Gaussian levels gain."""
    rows = {name: [c[name][0][1] for c in curves.values()] for name in VARIANTS}
    print_table("relative L2 of blockint at fixed bits", list(curves), rows, digits=3)


def error_ratios(curves: dict[str, Curves], name: str, bits: float) -> list[float]:
    """Relative L2 of ``name`` over that of radix with segments of 4096, both at ``bits``."""

    def error_at(curve: Sequence[Point]) -> float:
        turned = [(math.log2(e), 2.0**b) for b, e in curve if e > 0]
        return math.pow(2, bits_at(turned, 2.0**bits))

    return [error_at(c[name]) / error_at(c["radix"]) for c in curves.values()]


def segment_table(curves: dict[str, Curves]) -> None:
    """What the length of a segment costs or gains in relative L2 at equal bits."""
    rows = {
        f"{label} {bits} b": error_ratios(curves, name, bits)
        for bits in (4.0, 8.0)
        for name, label in (("radix seg 256", "256"), ("radix tensor", "tensor"))
    }
    print_table("relative L2 over that of segments of 4096, at equal bits", list(curves), rows)


def lossless_table(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    """Print bits per value of the lossless codecs; returns them by codec and dtype."""
    rows: dict[str, list[float]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name in ("expcode", "mpc"):
            # gradients of a mean loss underflow in fp16 without a loss scale
            scaled = {k: v * 1024 if "grad" in k else v for k, v in tensors.items()}
            rows[f"{name} {str(dtype)[6:]}"] = [
                codec_point(make_codec(name), values.to(dtype))[0] for values in scaled.values()
            ]
    print_table("bits per value, lossless", list(tensors), rows)
    return rows
