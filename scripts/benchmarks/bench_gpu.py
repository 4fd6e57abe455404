#!/usr/bin/env python3
"""Benchmark every codec on a GPU against a device copy and named peers in one run.

    python bench_gpu.py                    # tables, bench_gpu.md and .json
    python bench_gpu.py --check            # exit 1 if a target or a test is missed
    python bench_gpu.py --sizes 256M --only blockint Triton --no-tests

The default sizes take about four minutes on an H100, plus the tests. Rows of a message are printed
as soon as they are measured.

The tables explain themselves; the JSON has bits, seconds and GB/s too. Targets apply at 256 MB, for
small messages at 1 MB (gpu_bench/targets.py).

It also measures the cost of exchanging radix payload sizes first, and prints the message length
from which radix pays off, next to the threshold of `codec: "auto"`.

First it runs `pytest -m gpu tests/kernels/cuda` (skip with `--no-tests`), which checks that kernels
write the same bytes as on the CPU, that a replayed CUDA graph gives the same result and that an
all_reduce takes three launches. Peers that are not installed or do not build are skipped and named.
Exit status 2: no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.gpu_bench import (
    feedback,
    machine,
    markdown,
    ours,
    peers,
    prebuild,
    size_exchange,
    targets,
)
from benchmarks.gpu_bench.measure import Bench, DeviceStopwatch, HostStopwatch, Point, Work, cuda
from benchmarks.shared import TIME_IS_UP, parser_of
from hybridcomp.codecs.words import DTYPES
from hybridcomp.errors import install_hint

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = (256 << 20, 1 << 20, 64 << 20, 64 << 10, 16 << 20)  # sizes of the targets come first
SIZES_ON_CPU = (64 << 10, 16 << 10)
#: reason for a message that was skipped and that another call may measure
NO_TIME = "no time was left"
SLOW_S = 2.0  # slower subjects are reported: they compile
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

Source = Callable[[Tensor], Iterator[Work]]


@dataclass
class Found:
    """Points measured so far, and the reasons for those that were skipped."""

    points: list[Point] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def sources(only: Sequence[str] = ()) -> dict[str, Source]:
    """Return the subjects by name: all, or those whose name contains a word of ``only``."""
    mine: dict[str, Source] = {
        name: partial(ours.works, name=name, codec=codec) for name, codec in ours.codecs().items()
    }
    found = {**mine, ours.STEPS: ours.steps, feedback.NAME: feedback.works, **peers.PEERS}
    return {
        name: source
        for name, source in found.items()
        if not only or any(part.lower() in name.lower() for part in only)
    }


def measure(
    bench: Bench,
    messages: Sequence[tuple[int, str]],
    device: torch.device,
    found: Found,
    subjects: dict[str, Source],
    until: float = math.inf,
    then: Callable[[], object] = lambda: None,
) -> None:
    """Measure messages into ``found`` and print them; ``messages``: sizes in bytes, and dtypes.

    ``until``: time (of ``time.perf_counter``) after which no message is started; ``then``: called
    after each message.
    """
    for number, (nbytes, dtype) in enumerate(messages, 1):
        start = time.perf_counter()
        if start > until:
            found.left_out[f"{markdown.size_name(nbytes)} of {dtype}"] = NO_TIME
            continue
        before = len(found.points)
        generator = torch.Generator(device).manual_seed(0)
        numel = nbytes // DTYPES[dtype].itemsize
        values = torch.randn(numel, generator=generator, device=device).to(DTYPES[dtype])
        found.points.append(bench.copy_point(dtype, nbytes))
        for name, source in subjects.items():
            print(f"\r[{number}/{len(messages)}] {name:40}", end="", file=sys.stderr, flush=True)
            began = time.perf_counter()
            try:
                for work in source(values):
                    found.points.append(bench.measure(work, dtype, nbytes))
            except Exception as error:  # a peer may fail in any way
                reason = " ".join(str(error).split())[:200]
                where = f"{name}, {markdown.size_name(nbytes)} of {dtype}"
                found.left_out[where] = f"{type(error).__name__}: {reason}"
            if (took := time.perf_counter() - began) > SLOW_S:
                print(f"\r{name} took {took:.1f} s{'':30}", file=sys.stderr, flush=True)
        del values
        print(
            f"\r[{number}/{len(messages)}] {markdown.size_name(nbytes)} of {dtype}: "
            f"{len(found.points) - before} measured in {time.perf_counter() - start:.1f} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        print(*markdown.section(found.points[before:]), "", sep="\n", flush=True)
        then()


def prepare(chosen: dict[str, Source], dtypes: Sequence[str]) -> None:
    """Compile what our codecs among ``chosen`` need."""
    names = (*ours.codecs(), ours.STEPS, feedback.NAME)
    mine = [source for name, source in chosen.items() if name in names]
    wanted = prebuild.needed(mine, [DTYPES[name] for name in dtypes], torch.device("cuda", 0))
    if wanted:
        major, minor = cuda.get_device_capability(0)
        prebuild.compile_all(wanted, 10 * major + minor)


def run_tests() -> bool:
    """Run ``pytest -m gpu`` on the kernels' tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels/cuda"]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode == 0


def size_of(text: str) -> int:
    """Parse ``64K``, ``256M`` or ``1G`` to bytes. Raises ValueError."""
    unit = UNITS.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def main() -> int:
    """Parse arguments, test, measure, print and write results."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--sizes", type=size_of, nargs="+", default=SIZES, help="64K 256M 1G")
    add("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    add("--only", nargs="+", default=(), metavar="NAME", help="parts of names")
    add("--seconds", type=float, default=math.inf, help="begin no message later")
    add("--repeats", type=int, default=15)
    add("--md", type=Path, default=Path("bench_gpu.md"))
    add("--json", type=Path, default=Path("bench_gpu.json"))
    add("--no-tests", action="store_true", help="measure only")
    add("--resume", action="store_true", help="no message that --json has; 75: more")
    add("--cpu", action="store_true", help="small, to try the script itself")
    add("--check", action="store_true", help="fail if a target is missed")
    arguments = parser.parse_args()
    if arguments.cpu:
        arguments.sizes = SIZES_ON_CPU if arguments.sizes is SIZES else arguments.sizes
    elif not cuda.is_available():
        print(
            "no CUDA device: nothing was measured. Run this on a machine with one GPU, after "
            f"{install_hint('gpu')}; it takes no other preparation",
            file=sys.stderr,
        )
        return 2
    until = time.perf_counter() + arguments.seconds
    chosen, tested, device = sources(arguments.only), None, torch.device("cuda")
    if arguments.cpu:
        device = torch.device("cpu")
    else:
        with peers.prepared(chosen):  # builds while our codecs are measured and tests run
            prepare(chosen, arguments.dtypes)
            tested = None if arguments.no_tests else run_tests()
    watch = HostStopwatch if arguments.cpu else DeviceStopwatch
    bench, found = Bench(watch(arguments.repeats), device), Found()
    if arguments.resume:
        found.points = earlier(arguments.json)
    there = {(point.message_nbytes, point.dtype) for point in found.points}
    messages = [(nbytes, dtype) for nbytes in arguments.sizes for dtype in arguments.dtypes]
    known = {**machine.facts(device), "tests_passed": tested}
    missing = [message for message in messages if message not in there]
    kept = partial(keep, found, known, arguments.json)
    measure(bench, missing, device, found, chosen, until, kept)
    sizes = None
    try:
        if not arguments.only and time.perf_counter() < until:
            sizes = size_exchange.measured(bench)
    except Exception as error:  # keep the other figures, which took minutes
        found.left_out["exchange of sizes"] = f"{type(error).__name__}: {error}"
    status = conclude(found, sizes, known, arguments)
    late = arguments.resume and NO_TIME in found.left_out.values()
    return TIME_IS_UP if late else status


def earlier(path: Path) -> list[Point]:
    """Return the points of an earlier call, whose messages are not measured again."""
    if not path.is_file():
        return []
    names = [one.name for one in fields(Point)]
    rows = json.loads(path.read_text())["points"]
    return [Point(**{name: row[name] for name in names}) for row in rows]


def conclude(
    found: Found,
    sizes: size_exchange.Measured | None,
    known: dict[str, Any],
    arguments: argparse.Namespace,
) -> int:
    """Print and write the results; return the exit status."""
    missed = (
        []  # targets are for GPUs only
        if arguments.cpu
        else targets.missed(found.points, all_of_them=not arguments.only)
    )
    if known["tests_passed"] is False:
        missed.append("pytest -m gpu tests/kernels/cuda failed")
    exchange = size_exchange.facts(*sizes) if sizes else None
    known = {**known, "left_out": found.left_out, "missed": missed, "size_exchange": exchange}
    keep(found, known, arguments.json)
    arguments.md.write_text(markdown.document(found.points, known))
    for name, reason in found.left_out.items():
        print(f"left out: {name}: {reason}")
    if sizes:
        print(*size_exchange.lines(*sizes), sep="\n")
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed and arguments.check else 0


def keep(found: Found, known: dict[str, Any], path: Path) -> None:
    """Write the points so far for ``earlier``, in case that this process is killed."""
    rows = [{**asdict(point), "target": targets.target_of(point)} for point in found.points]
    half = path.with_suffix(".part")
    half.write_text(json.dumps({**known, "points": rows}, indent=1) + "\n")
    half.replace(path)


if __name__ == "__main__":
    sys.exit(main())
