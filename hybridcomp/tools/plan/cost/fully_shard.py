"""List the messages of FSDP2 in a step: ``fully_shard`` on every block and on the whole model.

Each micro-batch gathers a block's parameters before its forward pass and again before its backward
pass, gathers the root's parameters once, and reduces all gradients. On an HSDP mesh gathers and
reductions stay among the ranks that shard a model, and each rank all-reduces its shard over the
replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridcomp.tools.plan.choices import NATIVE, Choice
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.job import Item, PlannedJob
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.rows import Operation
from hybridcomp.tools.plan.models.model import ModelLayer

Layers = tuple[tuple[int, ModelLayer], ...]


def wrapped(job: PlannedJob, layers: Layers, values: float) -> list[tuple[float, float]]:
    """Return the size and frozen fraction of every ``fully_shard`` group, the root's first.

    ``values``: number of the whole model's; a weight that two layers share counts once.
    """
    blocks = [
        (layer.parameters + layer.expert_parameters, layer.frozen)
        for number, layer in layers if number in job.model.repeated
    ]  # fmt: skip
    return [(values - sum(size for size, _ in blocks), layers[0][1].frozen), *blocks]


def gathered_values(job: PlannedJob, layout: Layout, layers: Layers, values: float) -> float:
    """Return the values gathered at once: root and two blocks (one prefetched), or all."""
    root, *blocks = (size for size, _ in wrapped(job, layers, values))
    return values if layout.stays else root + 2 * max(blocks, default=0.0)


def messages(
    job: PlannedJob, layout: Layout, layers: Layers, values: float
) -> tuple[list[Item], list[Item]]:
    """Return the reductions of a micro-batch among the ranks that shard, and its gathers."""
    ranks = range(layout.owners)
    # an HSDP mesh encodes only messages between replicas
    how: Choice | None = NATIVE if layout.shards > 1 else None
    reduces, gathers = [], []
    for place, (size, frozen) in enumerate(wrapped(job, layers, values)):
        times = 1 if place == 0 or layout.stays else 2
        call = _call(job, layout, "reduce_scatter", (1 - frozen) * size, ranks)
        call = replace(call, encoded_as="reduce_scatter")
        reduces.append(Item(("dp", "forward"), call, job.gradient_dtype, fixed=how))
        call = _call(job, layout, "all_gather", size, ranks)
        gathers.append(Item(("zero", "forward"), call, job.dtype, times))
    return reduces, gathers


def sums_of_replicas(job: PlannedJob, layout: Layout, layers: Layers, values: float) -> list[Item]:
    """Return the all-reduces of gradient shards over the replicas of an HSDP mesh."""
    ranks = range(0, layout.data, layout.shards)
    parts = [(1 - frozen) * size / layout.shards for size, frozen in wrapped(job, layers, values)]
    calls = [_call(job, layout, "all_reduce", part, ranks) for part in parts]
    return [Item(("dp", "forward"), call, job.gradient_dtype) for call in calls]


def _call(
    job: PlannedJob, layout: Layout, operation: Operation, numel: float, ranks: range
) -> EngineCall:
    nodes, sites = job.cluster.nodes_of(ranks), job.cluster.sites_of(ranks)
    return EngineCall(operation, numel, len(ranks), nodes, sites=sites, levels=layout.levels)


def mesh_sizes(job: PlannedJob, layout: Layout) -> Iterator[int]:
    """Yield how many ranks may shard a model on an HSDP mesh: the ranks of one or several nodes."""
    nodes, _ = job.groups.of(layout, "replicas")
    if nodes < 2 or layout.data % nodes:
        return
    each = layout.data // nodes
    yield from (
        each * count for count in range(1, nodes) if nodes % count == 0 and each * count > 1
    )
