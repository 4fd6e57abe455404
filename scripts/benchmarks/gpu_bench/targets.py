"""Targets of the kernels: a minimum share of a device copy, and no comparable peer faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu_bench.measure import Point

MB = 1 << 20
#: message size of most targets
MESSAGE_NBYTES = 256 * MB
#: a shorter message, whose share may be lower by SLACK
SHORTER_NBYTES, SLACK = 64 * MB, 0.1
#: minimum of our share over cuZFP's. cuZFP's share is its published GB/s of fp32 values on an A100,
#: times 1.25 to count the written payload (8 bits), over a copy's speed, 90 % of 2039 GB/s. Source:
#: https://github.com/llnl/zfp/issues/144 (comment of 2023-09-20)
TIMES_CUZFP = 5.0
CUZFP_SHARES = {phase: g * 1.25 / (0.9 * 2039) for phase, g in (("encode", 180), ("decode", 130))}
#: differences below this count as noise: medians of two runs differ by as much
NOISE = 0.02
ALL = ("fp32", "bf16", "fp16")
#: for a message of 1 MB: maximum host microseconds; minimum share over that of the CUDA graph
HOST_US, OF_GRAPH = 60.0, 0.5
PATH = "all_reduce path"


@dataclass(frozen=True)
class Target:
    """Minimum share in a phase; ``subject``: a name of ours.codecs, or its first word."""

    subject: str
    phase: str
    share: float
    dtypes: tuple[str, ...] = ALL
    message_nbytes: int = MESSAGE_NBYTES


def _blockint(subject: str, less: float, sums: float, feedback: float) -> Iterator[Target]:
    yield Target(subject, "encode", 0.95 - less)
    yield Target(subject, "decode", 0.95 - less)
    yield Target(subject, "sum_encode", sums - less)
    yield Target(subject, "sum_encode feedback", feedback - less)


TARGETS = (
    *_blockint("blockint 8", 0.0, 0.85, 0.92),
    *_blockint("blockint 4", 0.0, 0.70, 0.86),
    *_blockint("blockint 4, gaussian", 0.05, 0.70, 0.86),
    *_blockint("blockint 4, lloyd", 0.25, 0.80, 0.86),
    *_blockint("blockint 4, rotate", 0.15, 0.70, 0.86),
    *(
        Target(f"blockint {bits}", phase, share, message_nbytes=MB)
        for bits in (8, 4)
        for phase, share in (("encode", 0.85), ("decode", 0.90))
    ),
    *(Target("fp8", phase, 0.90) for phase in ("encode", "decode")),
    *(Target("bf16", phase, 0.98) for phase in ("encode", "decode")),
    Target("expcode", "encode", 0.65),
    Target("expcode", "decode", 0.90),
    *(
        Target("blockint 4", f"{phase} feedback {bits}", share)
        for bits in (8, 4, 16)
        for phase, share in (
            ("chunks encode", 0.85),
            ("encode tensors", 0.85),
            ("encode stretches", 0.85),
            ("sum_encode", 0.80),
            ("sum", 0.80),
            ("sum stretches", 0.80),
        )
    ),
    *(
        Target("residual", f"{phase} {bits}", 0.90, ("fp32",))
        for bits in (8, 4, 16)
        for phase in ("load", "store")
    ),
    *(Target("pieces", phase, 0.90) for phase in ("add", "settle", "fill")),
    Target("stepcode", "encode", 0.50, ("bf16", "fp16")),
    Target("stepcode", "decode", 0.65, ("bf16", "fp16")),
    Target("radix", "encode", 0.45),
    Target("radix", "decode", 0.90, ("fp32",)),
    Target("radix", "decode", 0.75, ("bf16", "fp16")),
    *(Target("zfp 8", p, TIMES_CUZFP * share, ("fp32",)) for p, share in CUZFP_SHARES.items()),
    *(Target("mpc", phase, 0.40, ("fp32",)) for phase in ("encode", "decode")),
)

#: peers that our rows of the same phase must match
PEERS = {
    "blockint 8": (
        "Triton int8", "torch.compile int8", "bitsandbytes 8 bit", "DeepSpeed qwZ 8 bit",
    ),
    "blockint 4": (
        "Triton int4", "torch.compile int4", "bitsandbytes nf4", "DeepSpeed qgZ 4 bit",
    ),
    "expcode": ("nvCOMP ANS", "nvCOMP Bitcomp", "nvCOMP Cascaded"),
    "fp8": ("torch fp8 cast",),
}  # fmt: skip


def target_of(point: Point) -> float | None:
    """Return the share that ``point`` has to reach, or None."""
    found = [t for t in TARGETS if _speaks_of(point, t)]
    exact = [t for t in found if t.message_nbytes == point.message_nbytes]
    if exact:
        return exact[0].share
    return found[0].share - SLACK if found else None


def below(point: Point) -> bool:
    """Return whether ``point`` misses its target, at printed precision."""
    wanted = target_of(point)
    return wanted is not None and round(point.share, 2) < round(wanted, 2)


def _speaks_of(point: Point, target: Target) -> bool:
    sizes = [target.message_nbytes]
    if target.message_nbytes == MESSAGE_NBYTES:
        sizes.append(SHORTER_NBYTES)
    return (
        point.phase == target.phase
        and point.dtype in target.dtypes
        and point.message_nbytes in sizes
        and target.subject in (point.subject, point.subject.split()[0])
    )


def missed(points: Sequence[Point], *, all_of_them: bool = True) -> list[str]:
    """Return a line for each target that was missed or not measured at its message size."""
    lines = []
    for point in points:
        if below(point):
            lines.append(
                f"{_name(point)}: {point.share:.2f} of a copy, expected {target_of(point):.2f}"
            )
    for target in TARGETS if all_of_them else ():
        for dtype in target.dtypes:
            size = target.message_nbytes
            if not any(
                _speaks_of(p, target) and p.dtype == dtype and p.message_nbytes == size
                for p in points
            ):
                lines.append(
                    f"{target.subject} {target.phase} {dtype}: not measured at {size // MB} MB"
                )
    return lines + behind(points) + small(points)


def behind(points: Sequence[Point]) -> list[str]:
    """Return a line for each comparable peer that beats our codec at MESSAGE_NBYTES."""
    found = {(p.subject, p.phase, p.dtype): p for p in points if p.message_nbytes == MESSAGE_NBYTES}
    lines = []
    for (subject, phase, dtype), mine in found.items():
        for peer in PEERS.get(subject, ()):
            other = found.get((peer, phase, dtype))
            if other is not None and other.share > mine.share + NOISE:
                lines.append(f"{_name(mine)}: {mine.share:.2f}, {peer} {other.share:.2f}")
    return lines


def small(points: Sequence[Point]) -> list[str]:
    """Return a line for each all_reduce of 1 MB whose speed the host limits."""
    found = {(p.subject, p.dtype, p.phase): p for p in points if p.message_nbytes == MB}
    lines = []
    for (subject, dtype, phase), point in found.items():
        if phase == PATH and point.host_us > HOST_US:
            lines.append(f"{_name(point)}: {point.host_us:.0f} us of the host, at most {HOST_US:g}")
        graph = found.get((subject, dtype, f"{phase} graph"))
        if graph is not None and point.share < OF_GRAPH * graph.share:
            lines.append(
                f"{_name(point)}: {point.share / graph.share:.2f} of what a graph of the same "
                f"kernels reaches, expected {OF_GRAPH:g}"
            )
    return lines


def _name(point: Point) -> str:
    size = point.message_nbytes // MB
    return f"{point.subject} {point.phase} {point.dtype}, {size} MB"
