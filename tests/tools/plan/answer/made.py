"""Hand-made plans and a cluster, for tests of a plan's output."""

from __future__ import annotations

from typing import Any

from hybridcomp.dimensions import Key
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.rows import Rank
from hybridcomp.tools.plan.plan import Plan, Prediction, Span

CLUSTER = Cluster(tuple(Rank(number // 2, "made", 10**9) for number in range(4)))
ENCODED: dict[Key, Choice] = {
    ("dp", "forward"): Choice.of({"codec": "blockint", "bits": 4, "error_feedback": True}),
    ("pp", "forward"): Choice.of({"codec": "blockint", "bits": 8}),
    ("pp", "backward"): Choice.of("expcode"),
}


def prediction(seconds: float = 0.5, **changed: Any) -> Prediction:
    figures: dict[str, Any] = {
        "seconds": seconds, "low": 0.95 * seconds, "high": 1.1 * seconds,
        "tokens_per_second": 4 * 128 * 8 / seconds, "compute_seconds": 0.3,
        "bubble_seconds": 0.05, "codec_seconds": 0.01,
        "memory": {"weights": 4e8, "activations": 1e8, "host": 1e9},
        "memory_by_stage": (5e8, 4e8), "nbytes": {"dp": 1e6, "pp": 2e6},
        "native_nbytes": {"dp": 8e6, "pp": 4e6}, "exposed": {"dp": 0.1, "pp": 0.04},
        "hidden": {"dp": 0.1}, "job_nbytes": {"dp": 4e6, "pp": 4e6},
        "job_native_nbytes": {"dp": 32e6, "pp": 8e6},
        "spans": (Span("forward 0", "stage 0", 0.0, 0.2), Span("backward 0", "stage 0", 0.2, 0.4),
                  Span("pp 0", "link", 0.1, 0.15)),
    }  # fmt: skip
    return Prediction(**{**figures, **changed})


def plan(layout: Layout | None = None, told: Prediction | None = None, **changed: Any) -> Plan:
    """Return a plan for four ranks in two stages, with changed fields."""
    fields: dict[str, Any] = {
        "model": "tiny", "cluster": "made", "budget": "recommended", "length": 128,
        "dtype": "bf16", "engine": "deepspeed",
    }  # fmt: skip
    even = Layout(stages=2, data=2, cuts=(2, 2), zero_stage=1, micro_batch=2, accumulation=8)
    return Plan(layout or even, Choices.of(ENCODED), told or prediction(), **{**fields, **changed})
