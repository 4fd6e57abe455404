"""Describe a compression block in words, for ``hybridcomp validate`` and a job's start."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.config.block import CompressionConfig
from hybridcomp.config.codec_settings import NONE
from hybridcomp.config.presets import NATIVE, PAPER
from hybridcomp.dimensions import DIMENSIONS, ROWS, Dimension
from hybridcomp.escaping import quoted_path

#: message size in bytes that few jobs reach. Gradients are reduced in buckets, by default of 5e8
#: values in DeepSpeed and 4e7 in megatron-core; a small model has fewer values than a bucket
SELDOM_NBYTES = 1 << 28
#: number of steps that few jobs reach
SELDOM_STEPS = 1_000_000
#: dtypes that codecs encode, as text for warnings
KINDS = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES)


def describe(
    config: CompressionConfig,
    absent: Collection[Dimension] = (),
    unseen: Collection[Dimension] = (),
) -> list[str]:
    """Return a line for each compressed dimension, then lines about the other settings.

    A dimension whose directions have different codecs gets a line for each direction. ``absent``:
    dimensions without traffic in this job; ``unseen``: dimensions that a file cannot show. For
    ``absent`` and ``unseen`` the lines only list the names.
    """
    known = [name for name in DIMENSIONS if not ROWS[name].is_quiet or config.active(name)]
    later = [n for n in known if n in unseen and n not in absent and config.active(n)]
    here = [name for name in known if name not in absent and name not in later]
    lines = [line for name in here for line in _encoded(config, name)]
    native = [f"{name}{getattr(config, name).remark}" for name in here if not config.active(name)]
    if native:
        lines.append(f"{'native':13} {', '.join(native)}")
    if absent:
        lines.append(f"{'not here':13} {', '.join(n for n in known if n in absent)}")
    if later:
        lines.append(f"not in this file: {', '.join(later)} (used if the script has them)")
    absent = {*absent, *later}
    lines += _ramps(config)
    lines += _measured(config, absent)
    lines += _guarded(config, absent)
    if isinstance(config.hierarchy, int):
        lines.append(f"{'nodes':13} every {config.hierarchy} consecutive ranks share one")
    elif isinstance(config.hierarchy, list):
        lines.append(f"{'levels':13} {_levels(config)}")
    if config.pipeline.waitless:
        lines.append(f"{'pipeline':13} {_waitless(config.pipeline)}")
    if config.publish is not None:
        to, keep = quoted_path(config.publish.to), config.publish.keep
        every, full = config.publish.every, config.publish.anchor_every
        rest = "" if keep is None else f"; {keep} full version(s) and what follows them remain"
        lines.append(
            f"{'publish':13} to {to}, every {every} step(s), in full every {full} versions{rest}"
        )
    if config.gathered is not None:
        codec = config.gathered.codec_of()
        kept = f", steps from a copy on the {config.gathered.keep}"
        kept = kept if codec is not None and codec.references else ""
        lines.append(f"{'gathered':13} for roll-outs: {codec.spec if codec else 'none'}{kept}")
    if config.generate is not None:
        lines.append(f"{'generate':13} {config.generate.summary()}")
    small = [f"messages under {config.min_bytes} bytes"] if config.min_bytes else []
    early = [f"all messages before step {config.start_step}"] if config.start_step else []
    if small or early:
        lines.append(f"{'also native':13} {'; '.join(small + early)}")
    return lines


def _levels(config: CompressionConfig) -> str:
    widths = config.widths if isinstance(config.widths, list) else []
    below = ["ranks", "nodes", *["of these"] * len(widths)]
    words = [
        f"{'units' if level else 'nodes'} "
        + ("by the launcher" if width == "auto" else f"of {width} {below[level]}")
        + (f" with {codec.spec}" if codec else "")
        for level, (width, codec) in enumerate(zip(widths, config.level_codecs, strict=True))
    ]
    inside = "native inside but for these codecs" if any(config.level_codecs) else "native inside"
    return f"{', '.join(words)}: {inside}, encoded between the last"


def _waitless(settings: AsyncPipelineConfig) -> str:
    weights = "a version for each micro-batch under way"
    if settings.versions != "stash":
        newest, two = "the newest weights in both passes", "two versions, gradients one step late"
        weights = newest if settings.versions == 1 else two
    correction = "" if settings.correction == "none" else f", {settings.correction}"
    first = f", from step {settings.warmup}" if settings.warmup else ""
    return f"without a flush (experimental): {weights}{correction}{first}"


def _encoded(config: CompressionConfig, name: Dimension) -> Iterator[str]:
    """Yield the lines of one dimension; none if it is native."""
    codecs = config.codecs()
    ways = {way: codecs[name, way] for way in ROWS[name].directions}
    ways = {way: c for way, c in ways.items() if c is not None or way not in ROWS[name].apart}
    remark = getattr(config, name).remark
    if not config.active(name):
        return
    if len(set(ways.values())) > 1:
        for way, codec in ways.items():
            yield f"{f'{name} {way}':13} {_figures(name, codec)}{remark}"
        return
    yield f"{name:13} {_figures(name, next(iter(ways.values())))}{remark}"


def _ramps(config: CompressionConfig) -> Iterator[str]:
    for (name, way), rungs in config.ramps().items():
        text = name if ROWS[name].one_way else f"{name} {way}"
        first, last = rungs[0].codec.spec, rungs[-1].stop + config.start_step
        levels = f"{len(rungs)} levels" if len(rungs) > 1 else "1 level"
        yield f"{'ramp':13} {text}: from {first} in {levels}, as written from step {last}"


def _measured(config: CompressionConfig, absent: Collection[Dimension]) -> list[str]:
    here = [name for name in config.measured() if name not in absent]
    paced = [name for name, row in ROWS.items() if row.timed == "in real steps"]
    here += [name for name in paced if getattr(config, name).when == "auto"]
    words: dict[str | None, list[str]] = {}
    for name in here:
        words.setdefault(ROWS[name].timed, []).append(name)
    return [
        f"{'measured':13} {', '.join(names)}: native where that is faster, timed {when}"
        for when, names in words.items()
    ]


def _guarded(config: CompressionConfig, absent: Collection[Dimension]) -> list[str]:
    parts = []
    for name, limits in config.limits().items():
        if name in absent:
            continue
        figures = [("error", limits.error), ("residual", limits.residual)]
        text = " or ".join(f"{figure} {limit:g}" for figure, limit in figures if limit)
        parts.append(f"{name} {text}")
    return [f"{'guard':13} native for good beyond {'; '.join(parts)}"] if parts else []


def notes(config: CompressionConfig, dtype: torch.dtype) -> list[str]:
    """Return warnings about codecs that do not shorten, or do not take, ``dtype`` messages."""
    if dtype not in VALUE_DTYPES:
        active = ", ".join(name for name in DIMENSIONS if config.active(name))
        kind = str(dtype).removeprefix("torch.")
        return [f"{active}: messages of {kind} stay native; codecs take {KINDS}"] if active else []
    useless: dict[Codec, list[str]] = {}
    refused: list[str] = []
    for (name, _), codec in config.codecs().items():
        if codec and not codec.takes(dtype):
            kind = str(dtype).removeprefix("torch.")
            refused.append(f"{name}: {codec.name} does not take {kind}; such messages stay native")
        elif codec and _saves_nothing(codec, dtype):
            names = useless.setdefault(codec, [])
            names += [name] if name not in names else []
    advice = f"preset {config.preset} is made for fp32; " if config.preset in PAPER else ""
    return refused + [
        f"{', '.join(names)}: {codec.spec} takes {codec.bits_per_value(dtype):.4g} bits a value "
        f"and saves nothing on {str(dtype).removeprefix('torch.')} messages; {advice}"
        'use fewer bits, or preset "recommended"'
        for codec, names in useless.items()
    ]


def idle_notes(config: CompressionConfig, largest_nbytes: int | None = None) -> list[str]:
    """Return warnings about a block that compresses nothing, unless its preset is ``none``.

    ``largest_nbytes``: size of the job's largest message, if known.
    """
    active = any(config.active(name) for name in DIMENSIONS)
    if not active and (config.preset == NATIVE or config.others or config.kept_native):
        return []
    if not active:
        meant = f'name a codec, or write "preset": "{NATIVE}" where that is meant'
        return [f"no dimension has a codec, so nothing is compressed; {meant}"]
    warnings = []
    if largest_nbytes is not None and config.min_bytes > largest_nbytes:
        why = f"the largest message of this job has {largest_nbytes}, so nothing is compressed"
        warnings.append(f"min_bytes is {config.min_bytes} and {why}; lower it")
    elif largest_nbytes is None and config.min_bytes > SELDOM_NBYTES:
        why = "few messages of any job have as many, so nothing may be compressed"
        warnings.append(f"min_bytes is {config.min_bytes}: {why}; lower it (default 65536)")
    if config.start_step >= SELDOM_STEPS:
        why = "everything is native before, which may be the whole run"
        warnings.append(f"start_step is {config.start_step}: {why}; lower it")
    return warnings


def _saves_nothing(codec: Codec, dtype: torch.dtype) -> bool:
    """Return whether encoding never makes a message of ``dtype`` shorter."""
    known = codec.fixed_size and not codec.bounded and codec.low_rank is None
    return known and codec.bits_per_value(dtype) >= 8 * dtype.itemsize


def _figures(dimension: Dimension, codec: Codec | None) -> str:
    return NONE if codec is None else codec.cost_summary(summed=ROWS[dimension].summed)
