"""Run ``hybridcomp pays``: print the table and the estimate of a step for a job's file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.words import DTYPE_NAMES, DTYPES
from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.presets import PRESETS
from hybridcomp.dimensions import BETWEEN_RANKS, ROWS, Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import ds_check
from hybridcomp.tools.commands.job_files import JobFile, read_job_file
from hybridcomp.tools.plan import bits_between, meetings
from hybridcomp.tools.plan.bits_between import JobTraffic
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.pays import (
    Coder,
    MessageGroup,
    codecs_of,
    cost,
    documented,
    kept_codec,
    measured,
    sends_steps,
    sent_by,
    step_cost,
)

#: default number of ranks of a message's group
RANKS = 8
#: smallest and largest number on the command line, and most ranks
LEAST, MOST, MOST_RANKS = 1e-9, 1e15, 10**6
#: the block for a job that has none yet
SUGGESTED = {"preset": "recommended"}
#: bytes of the messages in the table
MESSAGES = (0.25e6, 4e6, 64e6)


def run(options: argparse.Namespace) -> int:
    """Print the table, and the estimate of a step if its options are given."""
    _check(options)
    config, file = _block(options.block)
    if file is not None:
        file = file.among(options.ranks or RANKS)
    job, micro_batches = _job(options, file)
    codecs, kept = codecs_of(config), config.zero.keeps_frozen if options.frozen else None
    opened = [] if kept is None else [kept_codec(kept)]
    device = _device(options, [*codecs.values(), *opened], job.dtype)
    if config.sync.acts and options.link is not None:
        met = filter(None, [config.sync.codec_of("forward")])
        print(meeting_line(config, job, _device(options, met, torch.float32), options))
    if not codecs and not (opened and options.link is not None):
        else_ = " else" if config.sync.acts else ""
        print(f"{options.block}: nothing{else_} that goes from rank to rank is compressed")
        return 0
    there = BETWEEN_RANKS if file is None else file.dimensions(config)
    if file is not None and BLOCK not in file.settings:
        print(f'{options.block} has no block; with "{BLOCK}": {json.dumps(SUGGESTED)}:')
    for line in table(config, job, device, there) if codecs else ():
        print(line)
    left_out = dict.fromkeys(name for name, _ in codecs if name not in there)
    if left_out:
        print(f"left out: {', '.join(left_out)}, of which {options.block} shows nothing; write one "
              'into its block to see it')  # fmt: skip
    if options.link is not None:
        sent = JobTraffic(job.stage) if file is None or file.whose == "block" else file.traffic()
        sent = replace(
            sent, stage=job.stage, dtype=job.dtype, summed=job.sent_as("dp"),
            micro_batches=micro_batches, frozen=options.frozen,
        )  # fmt: skip
        for line in bits_between.lines(config, sent):
            print(line)
        print(step_line(config, job, device, options, micro_batches))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that need an estimate, before anything is printed. Raises ConfigError."""
    figures = {name: getattr(options, name) for name in ("parameters", "compute", "link")}
    for name, found in {**figures, "codec_gbs": options.codec_gbs}.items():
        if found is not None and not LEAST <= found <= MOST:
            todo = f"expected a number from {LEAST:g} to {MOST:g}"
            raise ConfigError(f"--{name.replace('_', '-')}", found, todo)
    for name, least in (("ranks", 2), ("micro_batches", 1)):
        found = getattr(options, name)
        if found is not None and not least <= found <= MOST_RANKS:
            why = "one rank sends nothing; " if found == 1 and least == 2 else ""
            todo = f"{why}expected a whole number from {least} to {MOST_RANKS}"
            raise ConfigError(f"--{name.replace('_', '-')}", found, todo)
    bits_between.check_frozen(options.frozen)
    lacking = [f"--{name}" for name, found in figures.items() if found is None]
    if 0 < len(lacking) < len(figures):
        todo = "a step is estimated from --parameters, --compute and --link together; give all"
        raise ConfigError(", ".join(lacking), None, todo)
    for name in ("micro_batches", "frozen"):
        if lacking and (found := getattr(options, name)):
            todo = f"only the estimate of a step reads it; add {', '.join(lacking)}"
            raise ConfigError(f"--{name.replace('_', '-')}", found, todo)


def _device(options: argparse.Namespace, codecs: Iterable[Codec], dtype: torch.dtype) -> Coder:
    """Return the codecs' speeds: the option's, else a measured cluster's, else the documented."""
    for name in ("codec_gbs", "device"):
        if options.cluster is not None and (found := getattr(options, name)) is not None:
            todo = "--cluster has the measured speeds; give one of the two"
            raise ConfigError(f"--{name.replace('_', '-')}", found, todo)
    if options.cluster is not None:
        cluster = cluster_file.read(options.cluster)
        return measured(cluster, codecs, dtype, documented("cpu" if cluster.on_cpu else "gpu"))
    device = documented(options.device or "gpu")
    if options.codec_gbs is None:
        return device
    speeds = dict.fromkeys(device.speeds, options.codec_gbs)
    return replace(device, what=f"{options.codec_gbs:g} GB/s", speeds=speeds)


def _job(options: argparse.Namespace, file: JobFile | None) -> tuple[MessageGroup, int]:
    """Return the messages and micro-batches of a step, from options, the file, or defaults."""
    found, micro_batches = MessageGroup(RANKS), 1
    if file is not None and file.whose != "block":
        replicas, micro_batches = file.replicas or 1, file.accumulation or 1
        found = MessageGroup(
            replicas if replicas > 1 else RANKS, file.job.stage, DTYPES[file.dtype or "bf16"],
            DTYPES.get(file.job.summed_dtype or ""), has_hpz=file.traffic().copy != "none",
        )  # fmt: skip
    given = {"ranks": options.ranks, "stage": options.stage}
    found = replace(found, **{name: value for name, value in given.items() if value is not None})
    if options.dtype is not None:
        found = replace(found, dtype=DTYPES[options.dtype], summed=None)
    return found, micro_batches if options.micro_batches is None else options.micro_batches


def _block(text: str) -> tuple[CompressionConfig, JobFile | None]:
    """Return the block of a preset or a file, and the parsed file (None for a preset).

    A job's file without a block gets ``SUGGESTED``. Raises ConfigError.
    """
    if text in PRESETS:
        return CompressionConfig.parse({"preset": text}), None
    if not text or not Path(text).is_file():
        todo = f"no such file, and no preset; expected a file or one of {', '.join(PRESETS)}"
        raise ConfigError("BLOCK", text, todo)
    file = read_job_file(text)
    if BLOCK not in file.settings and file.is_job:
        return CompressionConfig.parse(SUGGESTED), file
    if BLOCK not in file.settings:
        raise ConfigError(text, "no block", f'expected "{BLOCK}" in it, or name a preset')
    block = CompressionConfig.parse(file.settings[BLOCK])
    if file.whose != "block":
        with suppress(ConfigError):  # validate tells what cannot act
            ds_check.check(block, file.settings)  # what the job leaves native loses its codec
    return block, file


def table(
    config: CompressionConfig, job: MessageGroup, device: Coder,
    there: Collection[Dimension] = BETWEEN_RANKS,
) -> Iterator[str]:  # fmt: skip
    """Yield a table of link speeds below which a codec pays, by dimension and message size.

    ``there``: the dimensions in which the job sends messages.
    """
    summed = job.sent_as("dp")
    gradients = "" if summed == job.dtype else f" (gradients {DTYPE_NAMES[summed]})"
    yield (
        f"{DTYPE_NAMES[job.dtype]} messages{gradients} among {job.ranks} ranks, ZeRO {job.stage}, "
        f"codecs on {device.what}: compression pays below"
    )
    sizes = "".join(f"{f'{nbytes / 1e6:g} MB':>12}" for nbytes in MESSAGES)
    yield f"{'dimension':13} {'codec':26} {'bits':>5} {sizes}   Gb/s of a rank's link"
    codecs = codecs_of(config)
    for (name, way), codec in codecs.items():
        same = codecs.get((name, "forward")) == codecs.get((name, "backward"))
        if (same and way == "backward") or name not in there:
            continue
        text = name if same or ROWS[name].one_way else f"{name} {way}"
        cells, (sent, sent_bits) = "", sent_by(config, name, codec, job, device)
        steps = name == "zero" and sends_steps(config, job)
        for nbytes in MESSAGES:
            numel = nbytes / job.sent_as(name).itemsize
            found = cost(name, sent, numel, job, device, sent_bits=sent_bits)
            if steps:  # once for all gathers of a step
                found = replace(found, native_nbytes=job.gathers(1) * found.native_nbytes)
            below = "native" if nbytes < config.min_bytes else f"{found.pays_below / 1e9:.3g}"
            cells += f"{below:>12}"
        spec = "steps of a node's copy" if steps else codec.spec
        yield f"{text:13} {spec[:26]:26} {sent_bits:5.1f} {cells}"


def meeting_line(
    config: CompressionConfig, job: MessageGroup, device: Coder, options: argparse.Namespace
) -> str:
    """Return the estimate of a meeting of islands, and how often they should meet."""
    sync = config.sync
    codec = sync.codec_of("forward")
    found = meetings.estimated(options.parameters, job.ranks, 1e9 * options.link, codec, device)
    share = found.seconds / (found.seconds + sync.every * options.compute)
    return (
        f"A meeting of {job.ranks} islands sends {found.nbytes / 1e6:.5g} MB of a rank in "
        f"{found.seconds:.3g} s, {share:.1%} of the time with every {sync.every} steps of "
        f"{options.compute:g} s; every {found.every(options.compute)} steps it is "
        f"{meetings.SHARE:.0%} or less (an estimate)"
    )


def step_line(
    config: CompressionConfig, job: MessageGroup, device: Coder, options: argparse.Namespace,
    micro_batches: int,
) -> str:  # fmt: skip
    """Return the estimate of a step with compressed gradients and parameters."""
    found = step_cost(
        config, options.parameters, job, device, micro_batches, options.frozen
    )  # fmt: skip
    faster = found.speed_up(1e9 * options.link, options.compute)
    return (
        f"A step of {options.compute:g} s of compute sends {found.native_nbytes / 1e6:.5g} MB of "
        f"gradients and parameters natively and {found.wire_nbytes / 1e6:.5g} MB encoded, whose "
        f"coding takes {1e3 * found.coding_s:.4g} ms: over {options.link:g} Gb/s it runs "
        f"{faster:.2f} times as fast as natively (an estimate; measure with hybridcomp compare)"
    )
