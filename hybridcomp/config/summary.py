"""What a block will do, in words: for ``hybridcomp validate`` and for the start of a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from hybridcomp.codecs import PowerSgd
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.bounded import Bounded
from hybridcomp.config.bounds import figures
from hybridcomp.config.codec_settings import NONE
from hybridcomp.config.presets import PRESETS
from hybridcomp.policy import DIMENSIONS, DIRECTIONS, ONE_WAY, Dimension

if TYPE_CHECKING:
    from hybridcomp.config.block import CompressionConfig

#: values of the message that ratios are stated for: 4 MiB of fp32
TYPICAL_NUMEL = 1 << 20
#: presets whose messages are meant to be fp32
PAPER = frozenset(PRESETS) - {"recommended"}


def lines(config: CompressionConfig, absent: Collection[Dimension]) -> list[str]:
    """One line for each compressed dimension (and direction, where they differ).

    ``absent``: dimensions without traffic in this job; they are only listed.
    """
    codecs, lines, native = config.codecs(), [], []
    for name in DIMENSIONS:
        if name in absent:
            continue
        ways = {way: codecs[name, way] for way in DIRECTIONS if (name, way) in codecs}
        shared = ", cut among tensor ranks" if name == "pp" and config.pp.scatter_gather else ""
        if not any(ways.values()):
            native.append(f"{name}{shared}")
        elif len(set(ways.values())) == 1:
            feedback = ", error feedback" if config.error_feedback(name) else ""
            deltas = _deltas(config) if name == "zero" else ""
            codec = _figures(name, codecs[name, "forward"])
            lines.append(f"{name:13} {codec}{feedback}{shared}{deltas}")
        else:
            lines += [
                f"{f'{name} {way}':13} {_figures(name, codec)}{shared}"
                for way, codec in ways.items()
            ]
    if native:
        lines.append(f"{'native':13} {', '.join(native)}")
    if absent:
        lines.append(f"{'not here':13} {', '.join(n for n in DIMENSIONS if n in absent)}")
    for (name, way), rungs in config.ramps().items():
        told = name if name in ONE_WAY else f"{name} {way}"
        first, last = rungs[0].codec.spec, rungs[-1].stop + config.start_step
        levels = f"{len(rungs)} levels" if len(rungs) > 1 else "1 level"
        lines.append(f"{'ramp':13} {told}: from {first} in {levels}, as written from step {last}")
    lines += _measured(config)
    lines += _guarded(config)
    if isinstance(config.hierarchy, int):
        lines.append(f"{'nodes':13} every {config.hierarchy} consecutive ranks share one")
    start = f"; all messages before step {config.start_step}" if config.start_step else ""
    lines.append(f"{'also native':13} messages under {config.min_bytes} bytes{start}")
    return lines


def _deltas(config: CompressionConfig) -> str:
    if not config.zero.delta:
        return ""
    every = config.zero.resync_every
    return ", of what changed" + (f", exact every {every} steps" if every else "")


def _measured(config: CompressionConfig) -> list[str]:
    early = [name for name in config.measured() if name in ONE_WAY]
    late = [name for name in config.measured() if name not in ONE_WAY]
    host = ["offload"] if config.offload.when == "auto" else []
    told: dict[str, Sequence[str]] = {
        "at start-up": early,
        "after the first step": late,
        "in real steps": host,
    }
    return [
        f"{'measured':13} {', '.join(names)}: native where that is faster, timed {when}"
        for when, names in told.items()
        if names
    ]


def _guarded(config: CompressionConfig) -> list[str]:
    parts = []
    for name, limits in config.limits().items():
        figures = [("error", limits.error), ("residual", limits.residual)]
        told = " or ".join(f"{figure} {limit:g}" for figure, limit in figures if limit)
        parts.append(f"{name} {told}")
    return [f"{'guard':13} native for good beyond {'; '.join(parts)}"] if parts else []


def notes(config: CompressionConfig, dtype: torch.dtype) -> list[str]:
    """Warnings about codecs that save nothing on messages of ``dtype``."""
    useless: dict[Codec, list[str]] = {}
    for (name, _), codec in config.codecs().items():
        if (
            codec
            and codec.fixed_size
            and not codec.bounded
            and not isinstance(codec, PowerSgd)
            and _bits(codec, dtype) >= 8 * dtype.itemsize
        ):
            names = useless.setdefault(codec, [])
            names += [name] if name not in names else []
    advice = f"preset {config.preset} is made for fp32; " if config.preset in PAPER else ""
    return [
        f"{', '.join(names)}: {codec.spec} takes {_bits(codec, dtype):.4g} bits a value and "
        f"saves nothing on {str(dtype).removeprefix('torch.')} messages; {advice}"
        'use fewer bits, or preset "recommended"'
        for codec, names in useless.items()
    ]


def _bits(codec: Codec, dtype: torch.dtype) -> float:
    """Bits a value in a typical message; the worst case when the size varies."""
    return codec.wire_nbytes(TYPICAL_NUMEL, dtype) * 8 / TYPICAL_NUMEL


def _figures(dimension: Dimension, codec: Codec | None) -> str:
    if codec is None:
        return NONE
    if isinstance(codec, Bounded):
        return figures(dimension, codec)
    if isinstance(codec, PowerSgd):
        return (
            f"{codec.spec}, r(n+m)/nm of the fp32 bytes of an n x m gradient, no bound on the "
            "error, vectors and small matrices exact"
        )
    if not codec.fixed_size:
        return f"{codec.spec}{', lossless' if codec.lossless else ''}, size varies with the values"
    wide, narrow = _bits(codec, torch.float32), _bits(codec, torch.bfloat16)
    return (
        f"{codec.spec}, {wide:.4g} bits a value: {32 / wide:.3g}x less than fp32, "
        f"{16 / narrow:.3g}x less than bf16"
    )
