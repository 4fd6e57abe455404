#!/usr/bin/env python3
"""Benchmark every codec against Tensor.copy_ and named peers in one run on one core.

    python bench_codecs.py                 # table
    python bench_codecs.py --check         # exit 1 if a target is missed

Speeds are bytes of uncompressed values per second in either direction. A single-threaded run is
timed by the thread's CPU time, which excludes waits for a core on a busy machine. Each repeat times
a copy and then every subject, so other load affects all of them equally. `x copy` is the copy's
best time divided by the subject's best time; the median column uses medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.shared import parser_of
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.words import DTYPES

COPY = "Tensor.copy_"
PHASES = ("encode", "decode", "decode_add")


@dataclass
class Subject:
    """A row of the table: ``phases`` maps a phase's name to the function to time."""

    name: str
    nbytes: int
    relative_error: float
    phases: dict[str, Callable[[], object]]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def best(self, phase: str) -> float:
        """Return the seconds of the fastest repeat of ``phase``."""
        return min(self.seconds[phase])


def relative_error(values: Tensor, decoded: Tensor) -> float:
    """Return |decoded - values| / |values|, in the 2-norm."""
    values = values.double()
    return float((decoded.double() - values).norm() / values.norm())


def codec_subject(codec: Codec, values: Tensor) -> Subject:
    """Return encode, decode and decode_add of one of our codecs."""
    dtype = values.dtype
    wire = torch.empty(codec.wire_nbytes(values.numel(), dtype), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    total = torch.zeros(values.numel(), dtype=torch.float32)
    payload = wire[: codec.encode(values, wire)]
    codec.decode(payload, decoded)
    phases: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values, wire),
        "decode": lambda: codec.decode(payload, decoded),
        "decode_add": lambda: codec.decode_add(payload, total, dtype),
    }
    return Subject(codec.spec, len(payload), relative_error(values, decoded), phases)


def eager_encode(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """blockint's quantization in eager torch, whole tensors at a time: (levels, tops)."""
    blocks = values.float().view(-1, 32)
    absmax = blocks.abs().amax(dim=1)
    tops = (((absmax.view(torch.int32) + 0x7FFFF) >> 19) << 19).view(torch.float32)
    inverse = ((2 ** (bits - 1) - 1) / tops).unsqueeze(1)
    levels = (blocks * inverse).round_().add_(2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        levels = levels[:, :16] | levels[:, 16:] << 4
    return levels, tops


def eager_decode(levels: Tensor, tops: Tensor, bits: int) -> Tensor:
    """Decode ``eager_encode``'s levels to fp32."""
    if bits == 4:
        levels = torch.cat((levels & 15, levels >> 4), dim=1)
    steps = (tops / (2 ** (bits - 1) - 1)).unsqueeze(1)
    return levels.float().sub_(2 ** (bits - 1)).mul_(steps).view(-1)


def eager_subject(bits: int, values: Tensor) -> Subject:
    """Return blockint as a user would write it in eager torch, without kernels."""
    levels, tops = eager_encode(values, bits)
    decoded = torch.empty_like(values)
    total = torch.zeros(values.numel(), dtype=torch.float32)
    phases: dict[str, Callable[[], object]] = {
        "encode": lambda: eager_encode(values, bits),
        "decode": lambda: decoded.copy_(eager_decode(levels, tops, bits)),
        "decode_add": lambda: total.add_(eager_decode(levels, tops, bits)),
    }
    error = relative_error(values, eager_decode(levels, tops, bits))
    return Subject(f"eager torch int{bits}", levels.numel() + tops.numel(), error, phases)


def zfpy_subject(rate: int, values: Tensor) -> Subject:
    """Return the zfp library through its own Python module (fp32 only)."""
    import zfpy

    array = values.float().numpy()
    stream = zfpy.compress_numpy(array, rate=rate)
    phases: dict[str, Callable[[], object]] = {
        "encode": lambda: zfpy.compress_numpy(array, rate=rate, write_header=False),
        "decode": lambda: zfpy.decompress_numpy(stream),
    }
    error = relative_error(values, torch.from_numpy(zfpy.decompress_numpy(stream)))
    return Subject(f"zfpy rate {rate}", len(stream), error, phases)


def subjects_of(values: Tensor) -> list[Subject]:
    """Return the copy, all codecs and peers, each warmed up by one encode and decode."""
    codecs = [
        make_codec("blockint", bits=8),
        make_codec("blockint", bits=4),
        make_codec("blockint", bits=4, rotate=True),
        make_codec("blockint", bits=4, levels="gaussian"),
        make_codec("blockint", bits=4, levels="lloyd"),
        *(make_codec("blockint", bits=bits, rounding="random") for bits in (8, 4)),
        make_codec("blockint", bits=4, rotate=True, levels="gaussian"),
        *(make_codec("blockint", bits=bits) for bits in (2, 3, 5, 6, 7)),
        make_codec("bf16"),
        make_codec("fp16"),
        make_codec("fp8", format="e4m3"),
        make_codec("fp8", format="e5m2"),
        *(make_codec("zfp", rate=rate) for rate in (4, 8, 16, 24)),
        make_codec("mpc"),
        make_codec("expcode"),
        make_codec("topk"),
        *(make_codec("radix", error_bound=bound) for bound in (3e-2, 1e-2, 1e-3)),
    ]
    target = values.clone()

    def copied() -> object:
        return target.copy_(values)

    copy = Subject(COPY, values.nbytes, 0.0, dict.fromkeys(PHASES, copied))
    peers = [eager_subject(8, values), eager_subject(4, values), zfpy_subject(8, values)]
    return [copy, *(codec_subject(codec, values) for codec in codecs), *peers]


def timed(function: Callable[[], object]) -> float:
    """Return seconds of one call."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def measure(subjects: list[Subject], repeats: int) -> None:
    """Time a copy before every subject; each phase of the first row gets all copies' times."""
    copy, *others = subjects
    copy.seconds = dict.fromkeys(PHASES, [])
    for _ in range(repeats):
        for subject in others:
            copy.seconds[PHASES[0]].append(timed(copy.phases[PHASES[0]]))
            for phase, function in subject.phases.items():
                subject.seconds.setdefault(phase, []).append(timed(function))


def missed_targets(subjects: list[Subject]) -> list[str]:
    """Return a line for each speed or ratio promised on fp32 values that this run missed."""
    rows = {subject.name: subject for subject in subjects}
    missed = []

    def expect(name: str, phase: str, target: float, peer: str = COPY) -> None:
        ratio = rows[peer].best(phase) / rows[name].best(phase)
        if ratio < target:
            missed.append(f"{name} {phase}: {ratio:.2f}x of {peer}, expected {target}x")

    for bits in (8, 4):
        for phase in ("encode", "decode_add"):
            expect(f"blockint(bits={bits})", phase, 0.8)
            expect(f"blockint(bits={bits})", phase, 3.0, f"eager torch int{bits}")
            expect("blockint(bits=4, rotate=True)", phase, 0.4)
            expect("blockint(bits=4, levels=gaussian)", phase, 0.7)
    expect("blockint(bits=4, levels=lloyd)", "encode", 0.8, "blockint(bits=4)")
    for phase in ("encode", "decode"):
        expect("zfp(rate=8)", phase, 4.0, "zfpy rate 8")
        expect("mpc(dim=1)", phase, 0.08)
        expect("expcode()", phase, 0.25)
        for name in (name for name in rows if name.startswith("radix")):
            expect(name, phase, 0.12 if phase == "encode" else 0.2)
    return missed


def print_table(subjects: list[Subject], values: Tensor) -> None:
    """Print speed in GB/s, then best and median ratio to the copy, for every phase."""
    head = "".join(f"{phase:>12}{'x copy':>8}{'median':>8}" for phase in PHASES)
    width = max(len(subject.name) for subject in subjects) + 1
    print(f"{'':{width}}{'bits':>7}{'relL2':>10}{head}")
    for subject in subjects:
        cells = ""
        for phase in PHASES:
            if phase not in subject.seconds:
                cells += f"{'-':>12}{'-':>8}{'-':>8}"
                continue
            best, copies = subject.best(phase), subjects[0].seconds[phase]
            median = statistics.median(copies) / statistics.median(subject.seconds[phase])
            cells += f"{values.nbytes / best / 1e9:>12.2f}{min(copies) / best:>8.2f}{median:>8.2f}"
        bits = subject.nbytes * 8 / values.numel()
        print(f"{subject.name:{width}}{bits:>7.2f}{subject.relative_error:>10.1e}{cells}")


def main() -> int:
    """Parse arguments, measure, print; the exit status is 1 if --check found a missed target."""
    parser = parser_of(__doc__)
    parser.add_argument("--mbytes", type=int, default=64, help="size of the values (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    arguments = parser.parse_args()
    if arguments.check and (arguments.dtype != "fp32" or arguments.threads != 1):
        parser.error("--check needs --dtype fp32 and --threads 1: the targets are stated for those")
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.dtype]
    torch.manual_seed(0)
    values = torch.randn(arguments.mbytes * 2**20 // dtype.itemsize).to(dtype)
    subjects = subjects_of(values)
    measure(subjects, arguments.repeats)
    print_table(subjects, values)
    missed = missed_targets(subjects) if arguments.check else []
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
