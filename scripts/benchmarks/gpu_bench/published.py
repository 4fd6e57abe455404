"""Published speeds of compressors that are not run here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """GB/s of uncompressed values on ``gpu``; ``peak_gbps`` is its data sheet's bandwidth."""

    subject: str
    encode_gbps: float
    decode_gbps: float
    gpu: str
    peak_gbps: float
    what: str
    source: str


#: A100-SXM4-80GB data sheet
A100_GBPS = 2039.0

PUBLISHED = (
    Published(
        "cuZFP", 180.0, 130.0, "A100", A100_GBPS,
        "fp32, 3-D field, kernel time; the rate is in a picture of the thread",
        "https://github.com/llnl/zfp/issues/144 (comment of 2023-09-20)",
    ),
    Published(
        "cuSZp2", 332.0, 513.0, "A100", A100_GBPS, "fp32 fields, end to end, average",
        "Huang et al., SC 2024 (cuSZp2), abstract",
    ),
    Published(
        "cuSZp3, fixed", 410.0, 628.0, "A100", A100_GBPS, "fp32, 1-D, end to end",
        "https://github.com/szcompressor/cuSZp (README)",
    ),
)  # fmt: skip


def cuzfp_share(phase: str, rate: float = 8.0) -> float:
    """Return cuZFP's bytes per second over those of a copy, as if measured at ``rate`` bits.

    A copy reaches about 90 % of the data sheet's bandwidth. Counting 8 bits written per value,
    where cuZFP may have written fewer, favours cuZFP.
    """
    found = PUBLISHED[0]
    gbps = found.encode_gbps if phase == "encode" else found.decode_gbps
    return gbps * (1 + rate / 32) / (0.9 * found.peak_gbps)
