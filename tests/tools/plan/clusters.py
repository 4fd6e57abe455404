"""Hand-written clusters and models for the planner's tests, and steps of layouts on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import memory_of
from hybridcomp.tools.plan.cost.predict import predicted
from hybridcomp.tools.plan.cost.work import Work, work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.cluster_file import parse
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.model import Model
from hybridcomp.tools.plan.plan import Prediction
from hybridcomp.tools.plan.request import Batch, SearchLimits


def cluster(
    nodes: int = 1, ranks_per_node: int = 4, gbits: float = 1.0, memory_gb: float = 1.0,
    speeds: Mapping[int, float] | None = None, **more: Any,
) -> Cluster:  # fmt: skip
    """Return CPUs of 50 GFLOP/s with a link of ``gbits`` between nodes, 10 times that inside."""
    return parse({
        "version": 1, "kind": "described", "nodes": nodes, "ranks_per_node": ranks_per_node,
        "device": "a CPU", "memory_gb": memory_gb, "tflops": {"fp32": 0.05, "bf16": 0.05},
        "inside": {"gbytes_per_second": 1.25 * gbits},
        "between": {"gbytes_per_second": 0.125 * gbits},
        "memory_gbytes_per_second": 10.0, "speeds": speeds or {},
        "codecs": {
            "blockint": {"gbytes_per_second": 1.1}, "expcode": {"gbytes_per_second": 0.8},
            "mpc": {"gbytes_per_second": 0.36}, "radix": {"gbytes_per_second": 0.41},
        },
        "host": {"gbytes_per_second": 5.0}, **more,
    })  # fmt: skip


def small(blocks: int = 4, hidden: int = 256, vocabulary: int = 270) -> Decoder:
    """Return the example model of the training benchmark."""
    return Decoder(
        "small", hidden, blocks, 4, 4, hidden // 4, 4 * hidden, vocabulary, norm="rmsnorm",
        rotary_copies=True, composed_norm=True, attention_copies=2, held_logits=True,
    )  # fmt: skip


class PlannedStep(NamedTuple):
    """A layout on a cluster: its work and prediction, and the memory of a rank by kind."""

    job: PlannedJob
    work: Work
    told: Prediction
    memory: dict[str, float]


def step(
    layout: Layout, machines: Cluster, block: Mapping[str, Any] | None = None,
    model: Model | None = None, length: int = 128, **limits: Any,
) -> PlannedStep:  # fmt: skip
    """Return a step of ``layout`` with the choices of ``block``, natively without one."""
    batch = Batch(layout.samples, length)
    job = PlannedJob(model or small(), machines, batch, SearchLimits(**limits))
    work, choices = work_of(job, layout), Choices.of_block(block) if block else Choices()
    return PlannedStep(job, work, predicted(job, work, choices), memory_of(job, work, 0, choices))
