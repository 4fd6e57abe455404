"""Synthetic measurement rows."""

from __future__ import annotations

from typing import Any


def record(
    arm: str, steps: list[float], sent: float, ratio: float | None = 4.0, n: int = 0
) -> dict[str, Any]:
    """Return a repetition of an arm, in the benchmark's format."""
    return {
        "layout": "dp2", "arm": arm, "ratio": ratio, "repetition": n, "steps": steps,
        "sent": sent, "rate": 8_000_000 if ratio else None, "tokens": 100, "loss": 2.0,
        "busy": 0.0, "burst_ms": 0.25, "native_sent": 4e6,
        "native": [5.0, 10.0, 20.0][: len(steps)], "compute": [1.0, 1.0, 4.0],
    }  # fmt: skip
