"""What the kernels must show, as shares of a device copy at 256 MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_bench.measure import Point
from gpu_bench.published import cuzfp_share

#: the message of every target
MESSAGE_NBYTES = 256 << 20
#: our share over the published one of cuZFP
TIMES_CUZFP = 5.0


@dataclass(frozen=True)
class Target:
    """At least this share in this phase; ``subject``: a name of ours.codecs, or its first word."""

    subject: str
    phase: str
    share: float


TARGETS = (
    *(
        Target(f"blockint {bits}", phase, 0.90)
        for bits in (8, 4)
        for phase in ("encode", "decode", "sum_encode")
    ),
    *(Target("expcode", phase, 0.75) for phase in ("encode", "decode")),
    Target("radix", "encode", 0.50),
    Target("radix", "decode", 0.60),
    *(
        Target("zfp 8", phase, max(0.40, TIMES_CUZFP * cuzfp_share(phase)))
        for phase in ("encode", "decode")
    ),
    *(Target("mpc", phase, 0.40) for phase in ("encode", "decode")),
)


def target_of(point: Point) -> float | None:
    """The share that ``point`` has to reach, None where nothing is asked of it."""
    if point.message_nbytes != MESSAGE_NBYTES:
        return None
    for target in TARGETS:
        if point.phase == target.phase and _names(target, point):
            return target.share
    return None


def missed(points: Sequence[Point]) -> list[str]:
    """A line for each target that was missed, or that no point speaks of."""
    lines = []
    for point in points:
        wanted = target_of(point)
        if wanted is not None and point.share < wanted:
            lines.append(
                f"{point.subject} {point.phase} {point.dtype}: {point.share:.2f} of a copy, "
                f"expected {wanted:.2f}"
            )
    for target in TARGETS:
        for dtype in ("fp32", "bf16"):
            if not any(_speaks_of(point, target, dtype) for point in points):
                lines.append(f"{target.subject} {target.phase} {dtype}: not measured at 256 MB")
    return lines


def _speaks_of(point: Point, target: Target, dtype: str) -> bool:
    return (
        (point.phase, point.dtype, point.message_nbytes) == (target.phase, dtype, MESSAGE_NBYTES)
    ) and _names(target, point)


def _names(target: Target, point: Point) -> bool:
    return target.subject in (point.subject, point.subject.split()[0])
