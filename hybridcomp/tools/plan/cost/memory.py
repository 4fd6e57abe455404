"""Estimate a rank's memory: weights, gradients, optimizer, activations, and codec buffers.

All bytes are those at the rank's peak: during some layer's backward pass, or the optimizer's step.
If backward allocates gradients one by one (one micro-batch, no buckets), gradients of layers that
come later in backward do not count in that peak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridcomp.channels.accounting.rank_messages import (
    RankMessages,
    Way,
    node_sums_nbytes,
    reference_nbytes,
    residual_nbytes,
)
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.copies import MOST_NUMEL, Copying
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.prices import MIN_BYTES
from hybridcomp.tools.plan.cost.schedule import layout_in_flight
from hybridcomp.tools.plan.cost.work import COPIED, KEPT, StageWork, Work, gathered, on_host
from hybridcomp.tools.plan.engines import runs
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.model import ModelLayer

#: bytes per value of an error feedback residual, of a main gradient, and of a moment
FP32 = 4.0


@dataclass(frozen=True)
class Moment:
    """The peak of backward: bytes of activations, and of the gradients allocated by then."""

    activations: float
    gradients: float


def memory_of(job: PlannedJob, work: Work, stage: int, choices: Choices) -> dict[str, float]:
    """Return the bytes of a rank of ``stage`` by kind (``plan.MEMORY_KINDS``)."""
    layout, own = work.layout, work.stages[stage]
    found = states(job, layout, own)
    held = kept(job, layout, own)
    made = _moment(job, layout, stage, own)
    found["activations"] = made.activations
    if _grows(job, layout):
        found["gradients"] = made.gradients
        # at the optimizer step there are all gradients and no activations; on a GPU torch's Adam
        # updates all parameters at once, and allocates a copy of one moment
        values = sum(own.trained)
        copied = 0.0 if job.on_cpu else FP32 * values
        if job.dtype.itemsize * values + copied > made.activations + made.gradients:
            found["gradients"], found["activations"] = job.dtype.itemsize * values, copied
    return {**found, **kept_by_codecs(job, layout, own, choices), **held}


def states(job: PlannedJob, layout: Layout, stage: StageWork) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer states, and those on the host."""
    width, values = job.dtype.itemsize, stage.dense + stage.experts
    # an expert's states are sharded only over the ranks that hold this expert
    replicas, shards_master = layout.owners, job.limits.engine == "fsdp2"
    share = (stage.dense + stage.experts * layout.expert) / replicas
    if shards_master:  # the optimizer counts the fp32 parameters
        width = 0 if width == 2 else width
    weights = width * (share if layout.zero_stage == 3 else values)
    dense, experts = stage.trained
    values, share = dense + experts, (dense + experts * layout.expert) / replicas
    optimizer = job.limits.states_nbytes * (share if job.sharded(layout) else values)
    main = job.gradient_dtype.itemsize
    gradients = main * (share if layout.zero_stage >= 2 else values)
    if layout.zero_stage == 0 and job.sharded(layout):
        gradients += FP32 * values  # BF16_Optimizer accumulates in fp32
    host = 0.0
    if layout.offload:
        kept = 1 - on_host(job, layout, stage)
        host = (1 - kept) * (1 - layout.drive) * optimizer
        # states that step on the device also need their gradients in fp32
        own = share if job.sharded(layout) else values
        optimizer = kept * (optimizer + FP32 * own)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "host": host}


def kept(job: PlannedJob, layout: Layout, stage: StageWork) -> dict[str, float]:
    """Return the bytes of gathered and of frozen kept parameters, and of a node's copy and sums."""
    found: dict[str, float] = {}
    if layout.zero_stage == 3:
        values = stage.dense + stage.experts
        found = {"gathered": job.dtype.itemsize * gathered(job, layout, stage).peak}
        if job.limits.engine == "fsdp2":  # new gradients, and those in reduction
            most = max((layer.parameters for _, layer in stage.layers), default=0.0)
            found["gathered"] += (job.dtype.itemsize + FP32) * most
        if layout.hpz > 1:
            width = COPIED[layout.copy].bits(job.dtype) / 8
            found["copy"] = width * values / layout.hpz
        if layout.frozen == "device":
            found["frozen"] = KEPT.bits(job.dtype) / 8 * (values - sum(stage.trained))
    if layout.accumulate == "node" and layout.shards > 1:
        found["sums"] = FP32 * sum(stage.trained) / layout.shards
    elif layout.accumulate == "node":
        sums = _reduced(job, layout, sum(stage.trained))
        found["sums"] = float(node_sums_nbytes(sums))
    return found


def kept_by_codecs(
    job: PlannedJob, layout: Layout, stage: StageWork, choices: Choices
) -> dict[str, float]:
    """Return the bytes of residuals, delta references, payload buffers and a ring's keys."""
    values = stage.dense + stage.experts
    found = {"residuals": 0.0, "references": 0.0, "keys": _sealed(job, layout, stage, choices)}
    gradients, parameters = choices["dp", "forward"], choices["zero", "forward"]
    codec = gradients.codec
    if codec is not None and gradients.error_feedback and stage.reduce + stage.micro:
        reduced = _reduced(job, layout, sum(stage.trained))
        found["residuals"] = float(sum(residual_nbytes(reduced, codec, gradients.residual_bits)))
    if parameters.delta and stage.gather:
        gathered = RankMessages((round(values),), "gather", job.dtype, layout.size("replicas"))
        found["references"] = float(reference_nbytes(gathered))
    largest = 0.0
    for items, _ in stage.messages():
        for item in items:
            choice = item.fixed or choices[item.key]
            # the host codes states, and kept weights are only decoded: neither takes a buffer here
            kept = isinstance(item.call, EngineCall) and item.call.kept
            if not choice.native and not kept and item.key[1] != "states":
                numel = item.call.numel
                if isinstance(item.call, Copying):
                    numel = min(numel, MOST_NUMEL)
                largest = max(largest, 2 * numel * choice.bits(item.dtype) / 8)
    found["payloads"] = largest
    return found


def _reduced(job: PlannedJob, layout: Layout, values: float) -> RankMessages:
    """Return the messages that reduce ``values``: a full bucket, and the rest as a second one."""
    ranks = layout.size("replicas")
    call = replace(job.groups.call("all_reduce", 0.0, layout, "replicas", 0), levels=layout.levels)
    width = math.prod(call.inside)
    bucket = min(round(values), round(job.limits.bucket_numel))
    numels = tuple(filter(None, (bucket, round(values) - bucket)))
    if layout.shards > 1:
        numels = (round(values / layout.shards),)
        return RankMessages(numels, "sum", job.gradient_dtype, ranks // layout.shards,
                            on_gpu=not job.on_cpu)  # fmt: skip
    how: Way = "own" if layout.zero_stage in (1, 2) else "sum"
    if layout.zero_stage == 3 or (layout.zero_stage and job.limits.engine == "megatron"):
        how = "scatter"
    return RankMessages(numels, how, job.dtype, ranks, width, on_gpu=not job.on_cpu)


def _sealed(job: PlannedJob, layout: Layout, stage: StageWork, choices: Choices) -> float:
    """Return the bytes of encoded keys and values that their owner keeps for a ring's backward.

    Native keys and values count as activations; recomputed layers encode their own again.
    """
    choice = choices["cp", "forward"]
    if choice.native or layout.context == 1 or layout.context_way != "ring":
        return 0.0
    held = [
        sum(layer.forward.ring) for number, layer in stage.layers
        if number not in layout.recomputed
    ]  # fmt: skip
    values = sum(numel for numel in held if numel * job.dtype.itemsize >= MIN_BYTES)
    flying = layout_in_flight(layout, stage.rank // layout.ranks_per_stage)
    return values * choice.bits(job.dtype) / 8 * flying / layout.virtual


def _grows(job: PlannedJob, layout: Layout) -> bool:
    """Return whether backward allocates the gradients one by one."""
    return (
        job.limits.engine != "megatron" and layout.accumulation == 1 and layout.stages == 1
        and layout.zero_stage == 0
    )  # fmt: skip


def _moment(job: PlannedJob, layout: Layout, stage: int, own: StageWork) -> Moment:
    """Return the peak of the backward pass while all other micro-batches are in flight."""
    flying = layout_in_flight(layout, stage)
    layers = [layer for _, layer in own.layers]
    segments = local_segments(layout, own)
    one = kept_nbytes(layers, segments)
    # each chunk in flight is one of the stage's virtual stages
    before = (flying / layout.virtual - 1) * one if flying else 0.0
    made = worst_moment(layers, segments, job.dtype.itemsize, grows=_grows(job, layout))
    return Moment(max(0.0, before) + made.activations, made.gradients)


def local_segments(layout: Layout, stage: StageWork) -> list[tuple[int, int]]:
    """Return the recomputed segments, as indices into the stage's layers."""
    place = {number: index for index, (number, _) in enumerate(stage.layers)}
    return sorted(
        run for start, stop in layout.recompute
        for run in runs(place[number] for number in range(start, stop) if number in place)
    )  # fmt: skip


def kept_nbytes(layers: Sequence[ModelLayer], segments: Sequence[tuple[int, int]]) -> float:
    """Return the bytes that one micro-batch keeps between forward and backward."""
    starts, kept, position = dict(segments), 0.0, 0
    while position < len(layers):
        kept += layers[position].input_nbytes if position in starts else (
            layers[position].kept_nbytes)  # fmt: skip
        position = starts.get(position, position + 1)
    return kept


def worst_moment(
    layers: Sequence[ModelLayer], segments: Sequence[tuple[int, int]], width: int, *, grows: bool
) -> Moment:
    """Return the peak of one backward pass. grows: whether it allocates gradients one by one."""
    total = width * sum(_trained(layer) for layer in layers)
    starts, kept, done, position = dict(segments), 0.0, 0.0, 0
    worst = Moment(0.0, 0.0)
    while position < len(layers):
        stop = starts.get(position, position + 1)
        inside = list(layers[position:stop])
        alive = 0.0
        for layer in inside:
            alive += layer.kept_nbytes
            made = width * _trained(layer)
            gradients = max(0.0, total - done - made) if grows else 0.0
            now = Moment(kept + alive + layer.work_nbytes, gradients)
            if now.activations + now.gradients > worst.activations + worst.gradients:
                worst = now
            done += made
        kept += inside[0].input_nbytes if position in starts else alive
        position = stop
    return worst


def _trained(layer: ModelLayer) -> float:
    return (1 - layer.frozen) * (layer.parameters + layer.expert_parameters)


def device_nbytes(memory: Mapping[str, float]) -> float:
    """Return the bytes of all kinds that are on the device."""
    return sum(value for kind, value in memory.items() if kind != "host")
