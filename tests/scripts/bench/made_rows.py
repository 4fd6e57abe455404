"""Stand-ins for what measurements leave: nobody measured these rows."""

from __future__ import annotations

from typing import Any

from bench.training_bench import cells


def record(
    arm: str, steps: list[float], sent: float, ratio: float | None = 4.0, n: int = 0
) -> dict[str, Any]:
    """One repetition of an arm, as the bench keeps it."""
    return {
        "layout": "dp2", "arm": arm, "ratio": ratio, "repetition": n, "steps": steps,
        "sent": sent, "rate": 8_000_000 if ratio else None, "tokens": 100, "loss": 2.0,
        "codec_s": 0.0, "rounds": 0.0, "busy": 0.0, "burst_ms": 0.25, "native_sent": 4e6,
        "native": [5.0, 10.0, 20.0][: len(steps)], "compute": [1.0, 1.0, 4.0],
    }  # fmt: skip


def loss_row(label: str, sent: float, gap: float, half: float | None = 0.1) -> dict[str, Any]:
    """A run of a comparison that ended ``gap`` per cent from the baseline."""
    shift = 0.05 * len(label) / 10  # what seeds do to one run they do about as much to another
    return {
        "label": label, "gap": gap, "gap_interval": half, "steps": 1000,
        "seeds": [0] if half is None else [0, 1, 2],
        "gaps": [gap] if half is None else [gap - shift, gap, gap + shift],
        "ledger": {name: {"forward": {"wire_MB": sent / 2}} for name in ("dp", "zero")},
    }  # fmt: skip


def measured(layout: str, r: float, arm: str, sent: float, codec: float) -> dict[str, Any]:
    """A row whose seconds follow the cost model exactly."""
    compute, slowdown = {"dp2": (1.0, 1.1), "pp2": (0.5, 1.4)}[layout]
    rate, rounds = 8 * 4e6 / (r * compute), {"recommended": 3, "naive-zfp": 9}.get(arm, 0)
    seconds = compute + slowdown * 8 * sent / rate + 0.8 * codec + 0.01 * rounds
    return {"layout": layout, "r": r, "arm": arm, "rate": rate, "sent_MB": sent / 1e6,
            "codec_s": codec, "rounds": rounds, "seconds": seconds,
            "compute_s": 1.25 * compute}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Two layouts at three rates, each natively and with two presets."""
    sizes = {cells.REFERENCE: (4e6, 0.0), "recommended": (0.5e6, 0.05), "naive-zfp": (1e6, 0.2)}
    return [
        measured(layout, r, arm, *size)
        for layout in ("dp2", "pp2") for r in (0.25, 1.0, 4.0) for arm, size in sizes.items()
    ]  # fmt: skip
