"""Time codecs and copies of a device: every codec by dtype, alone and during matrix products.

With a GPU, codecs are also timed on the host: it codes if it holds the optimizer states
(``host_rows``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from itertools import product as every
from pathlib import Path
from statistics import median

import torch

from hybridcomp.channels.offload.pinned_receive_buffers import fewer_threads
from hybridcomp.codecs import CODECS, Codec
from hybridcomp.codecs.exact_steps import typical_steps
from hybridcomp.codecs.words import DTYPES
from hybridcomp.config import CompressionConfig
from hybridcomp.config.presets import PRESETS
from hybridcomp.errors import HybridcompError
from hybridcomp.tools.measure.clock import LEAST, CallClock, HostCallClock, Run, samples
from hybridcomp.tools.measure.kernels import dtypes_of, matrix_product
from hybridcomp.tools.measure.team import MeasuredPart, Team
from hybridcomp.tools.plan.machines.estimates import Estimate, summary
from hybridcomp.tools.plan.machines.rows import Beside, Coding, Copy, Direction

#: values of one call; the first gives the constant seconds of a call
NUMELS = {"cpu": (1 << 12, 1 << 18, 1 << 21), "cuda": (1 << 12, 1 << 20, 1 << 24)}
COPIES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 16, 1 << 20, 1 << 26)}
#: bytes of files on a drive
FILES = (1 << 20, 1 << 26)
DIRECTIONS: tuple[Direction, ...] = ("encode", "decode", "decode_add")
#: on hosts of GPUs: values of a call, and their dtypes (fp32 for master weights)
HOST_NUMELS, HOST_DTYPES = (1 << 16, 1 << 22), ("fp32", "bf16")
#: rows and columns of the matrix product that runs concurrently with a codec
SIDE = {"cpu": 192, "cuda": 2048}


def settings() -> list[Codec]:
    """Return the codecs to time: those of the presets, and all others with their defaults.

    Codecs that only reduce gradients, and encode nothing, are left out.
    """
    found: dict[str, Codec] = {}
    for name in PRESETS:
        for codec in CompressionConfig.parse({"preset": name}).codecs().values():
            if codec is not None:
                found.setdefault(codec.spec, codec)
    for kind in CODECS.values():
        codec = kind()
        if not codec.gradients_only:
            found.setdefault(codec.spec, codec)
    return list(found.values())


def coding_rows(team: Team, clock: CallClock, part: MeasuredPart) -> list[Coding]:
    """Time this rank's codecs; a collective over the job, as all begin every case together."""
    numels = NUMELS[team.device.type]
    # the two shorter lengths also give seconds per call and per value during matrix products
    work: list[tuple[int, Beside]] = [
        *((numel, "alone") for numel in numels), *((numel, "compute") for numel in numels[:2])
    ]  # fmt: skip
    cases = [
        (numel, beside, name, codec)
        for (numel, beside), name, codec in every(work, dtypes_of(team.device), settings())
    ]
    product, product_s = product_beside(clock, team.device)
    rows = []
    for (numel, beside, name, codec), allowance in zip(
        cases, part.allowances(len(cases)), strict=True
    ):
        if beside == "alone" and numel == numels[-1] and not allowance:
            continue
        for direction, run in _runs(codec, numel, DTYPES[name], team.device):
            seconds = samples(clock, run, allowance / len(DIRECTIONS))
            if beside == "compute":
                expected, count = median(seconds), max(LEAST, len(seconds) // 2)
                seconds = [clock.beside(run, product, product_s, expected)[0] for _ in range(count)]
            figure = summary(seconds)
            row = Coding(codec.spec, name, direction, numel, figure, beside, codec.fixed_size)
            rows.append(row)
    return rows


def host_rows(team: Team, part: MeasuredPart) -> list[Coding]:
    """Time codecs on this rank's host, on the cores that copies use; a collective."""
    rows, clock = [], HostCallClock()
    cases = list(every(HOST_NUMELS, HOST_DTYPES, settings()))
    with fewer_threads():
        for (numel, name, codec), allowance in zip(cases, part.allowances(len(cases)), strict=True):
            for direction, run in _runs(codec, numel, DTYPES[name], torch.device("cpu")):
                if direction != "decode_add":
                    found, fixed = summary(samples(clock, run, allowance / 2)), codec.fixed_size
                    rows.append(Coding(codec.spec, name, direction, numel, found, "alone", fixed))
    return rows


def product_beside(clock: CallClock, device: torch.device) -> tuple[Run, float]:
    """Build the matrix product that runs during other work; return it and its seconds alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    run = matrix_product(SIDE[device.type], device, dtype)()
    return run, median(samples(clock, run, 0.05))


def random_values(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return normal values, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator).to(device, dtype)


def _runs(
    codec: Codec, numel: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Direction, Run]]:
    """Yield the calls of a codec to time; none where it cannot take the dtype or the device."""
    values = random_values(numel, dtype, device)
    if codec.references:
        yield from _step_runs(codec, values) if codec.takes(dtype) else ()
        return
    try:
        one = codec.for_message(numel, dtype, 1)
        payload = torch.zeros(one.wire_nbytes(numel, dtype), dtype=torch.uint8, device=device)
        one.encode(values, payload)
    except HybridcompError:
        return
    out, total = torch.empty_like(values), torch.zeros(numel, device=device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    yield "encode", lambda: one.encode_into(values, payload, size)
    yield "decode", lambda: one.decode(payload, out)
    yield "decode_add", lambda: one.decode_add(payload, total, dtype)


def _step_runs(codec: Codec, values: torch.Tensor) -> Iterator[tuple[Direction, Run]]:
    """Yield the calls of a codec of steps: encode a typical step of ``values``, and decode it."""
    held, sizes = typical_steps(values), torch.zeros(2, dtype=torch.int64, device=values.device)
    ways = [(values, codec.against(held)), (held, codec.against(values))]
    payloads = [
        torch.zeros(one.wire_nbytes(now.numel(), now.dtype), dtype=torch.uint8, device=now.device)
        for now, one in ways
    ]
    for (now, one), payload, size in zip(ways, payloads, torch.split(sizes, 1), strict=True):
        one.encode_into(now, payload, size)
    used = [payload[:size] for payload, size in zip(payloads, sizes.tolist(), strict=True)]
    out, turns = held.clone(), cycle(zip(ways, used, strict=True))
    scratch = torch.zeros_like(payloads[0])

    def decode() -> None:
        (_, one), payload = next(turns)
        one.decode(payload, out)

    yield "encode", lambda: ways[0][1].encode_into(values, scratch, sizes[:1])
    yield "decode", decode


def copy_rows(team: Team, clock: CallClock, part: MeasuredPart) -> list[Copy]:
    """Time copies between this rank's device and pinned host memory; on a CPU inside memory."""
    rows: list[Copy] = []
    sizes = COPIES[team.device.type]
    pin = team.device.type == "cuda"
    for nbytes, allowance in zip(sizes, part.allowances(len(sizes)), strict=True):
        there = torch.zeros(nbytes, dtype=torch.uint8, device=team.device)
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin)
        out = samples(clock, lambda a=host, b=there: a.copy_(b, non_blocking=True), allowance / 2)  # type: ignore[misc]
        back = samples(clock, lambda a=host, b=there: b.copy_(a, non_blocking=True), allowance / 2)  # type: ignore[misc]
        rows.append(Copy("to_host", nbytes, summary(out)))
        rows.append(Copy("to_device", nbytes, summary(back)))
    return rows


def drive_rows(team: Team, part: MeasuredPart, folder: Path) -> list[Copy]:
    """Time files in ``folder``, past the page cache, of all ranks at once.

    Raises HybridcompError.
    """
    rows, clock, path = [], HostCallClock(), folder / f".hybridcomp-{team.rank}-{os.getpid()}"
    try:
        for nbytes, allowance in zip(FILES, part.allowances(len(FILES)), strict=True):
            data = torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().data
            wrote = samples(clock, lambda one=data: _write(path, one), allowance / 2)  # type: ignore[misc]
            read = samples(clock, lambda one=data: _read(path, one), allowance / 2)  # type: ignore[misc]
            rows.append(Copy("to_drive", nbytes, summary(wrote)))
            rows.append(Copy("from_drive", nbytes, summary(read)))
    except OSError as error:
        # only this rank fails, while other ranks wait for its figures: name the folder and the
        # reason
        why = f"no file of {FILES[-1] >> 20} MiB can be written there: {error.strerror or error}"
        raise HybridcompError(f"--drive: {folder}: {why}; name another folder") from None
    finally:
        path.unlink(missing_ok=True)
    return rows


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fdatasync(file.fileno())


def _read(path: Path, data: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.readinto(data)


def merged(figures: Sequence[Estimate]) -> Estimate:
    """Merge figures of all ranks: the median of the values, the lowest low, the highest high."""
    return Estimate(
        median([figure.value for figure in figures]),
        min(figure.low for figure in figures),
        max(figure.high for figure in figures),
    )
