"""Enumerate the layouts: all degrees over the ranks that the engine can run.

Cuts and recomputation are not chosen here (``placing``): they depend on memory and on the devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from hybridcomp.tools.plan.cost.fully_shard import mesh_sizes
from hybridcomp.tools.plan.cost.gathers import TIGHT
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.layout import ContextWay, Copy, Layout
from hybridcomp.tools.plan.search.slicing import sliced

#: numbers of virtual stages to try
VIRTUAL = (1, 2, 4)
#: engines with ZeRO 3, whose nodes may keep copies and sums
UNCUT_ENGINES = ("deepspeed", "fsdp2")
UNCUT = "the model cannot be cut so: "


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number``, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def world(job: PlannedJob) -> int:
    """Return the number of ranks that a plan uses."""
    return job.limits.ranks or job.cluster.world_size


def layouts(job: PlannedJob, refused: Counter[str]) -> Iterator[Layout]:
    """Yield every layout of the space, without cuts; count in ``refused`` refusals by reason.

    Layouts that contradict the user's fixed fields are counted only where no other is left.
    """
    others: Counter[str] = Counter()
    found = False
    for layout in _every(job, refused, others):
        found = True
        yield layout
    if not found:
        refused.update(others)


def _every(job: PlannedJob, refused: Counter[str], others: Counter[str]) -> Iterator[Layout]:
    """Yield the layouts; count in ``others`` those that contradict the user's fixed fields."""
    ranks = world(job)
    mixture = any(layer.expert_parameters for layer in job.layers(Layout()))
    for tensor in divisors(ranks):
        for stages in divisors(ranks // tensor):
            for context in divisors(ranks // tensor // stages):
                data = ranks // tensor // stages // context
                for expert in divisors(data) if mixture else [1]:
                    for way in _ways(job, context):
                        base = Layout(tensor=tensor, stages=stages, context=context, data=data,
                                      expert=expert, context_way=way)  # fmt: skip
                        yield from _decided(job, base, refused, others)
    if job.limits.owns("tp2d"):
        for mesh in range(2, math.isqrt(ranks) + 1):
            if ranks % mesh**2 == 0:
                base = Layout(mesh=mesh, data=ranks // mesh**2, context_way=_ways(job, 1)[0])
                yield from _decided(job, base, refused, others)


def _decided(
    job: PlannedJob, base: Layout, refused: Counter[str], others: Counter[str]
) -> Iterator[Layout]:
    """Yield the layouts of ``base``, none where it contradicts the user's fixed fields."""
    names = ("tensor", "stages", "context", "expert", "mesh")
    if job.limits.engine == "fsdp2" and not base.is_uncut and not set(names) & {*job.limits.fixed}:
        return  # it cuts no layer, and nobody asks for that
    if _fixed(job, base, (*names, "data")):
        yield from _refined(job, base, refused, others)


def _ways(job: PlannedJob, context: int) -> tuple[ContextWay, ...]:
    """Return the ways of context parallelism: Megatron has a ring, DeepSpeed may use ours."""
    found: tuple[ContextWay, ...] = ("ulysses", "ring")
    if job.limits.engine == "megatron":
        found = ("ring",)
    elif not job.limits.owns("ring"):
        found = ("ulysses",)
    if context == 1:
        return found[:1]
    return tuple(way for way in found if job.limits.fixed.get("context_way", way) == way)


def _fixed(job: PlannedJob, layout: Layout, names: tuple[str, ...]) -> bool:
    """Return whether these fields have the values that the user has fixed."""
    fixed = job.limits.fixed
    return all(getattr(layout, name) == fixed[name] for name in names if name in fixed)


def _refined(
    job: PlannedJob, base: Layout, refused: Counter[str], others: Counter[str]
) -> Iterator[Layout]:
    """Yield ``base`` with every value of the fields that leave its groups as they are."""
    reason = _unfit(job, base)
    if reason is not None:
        refused[reason] += 1
        return
    samples, rest = divmod(job.batch.samples, base.data)
    if rest or not samples:
        refused["the samples of a step cannot be divided among the replicas"] += 1
        return
    names = ("sequence", "virtual", "zero_stage", "micro_batch", "accumulation", "offload",
             "hierarchy", "slices", "hpz", "copy", "frozen", "accumulate", "ratio",
             "knobs", "shards", "stays")  # fmt: skip
    for sequence in (False, True) if _sequences(job, base) else (False,):
        for micro_batch in divisors(samples):
            if micro_batch > job.limits.most_micro_batch:
                continue
            for virtual in _virtual(job, base, samples // micro_batch):
                cut = base.replace(
                    sequence=sequence, micro_batch=micro_batch, virtual=virtual,
                    accumulation=samples // micro_batch,
                )  # fmt: skip
                if reason := job.model.refuses(job.shape(cut)):
                    refused[UNCUT + reason] += 1
                    continue
                if reason := _undecided(job, cut):
                    refused[reason] += 1
                    continue
                for found in _whole(job, cut):
                    if _fixed(job, found, names):
                        yield found
                    else:
                        others[_other(job, found, names)] += 1


def _undecided(job: PlannedJob, layout: Layout) -> str | None:
    """Say why ``layout`` cannot have the values that the user has fixed; None where it can."""
    fixed, depth = job.limits.fixed, job.model.depth
    last = max((stop for _, stop in fixed.get("recompute", ())), default=0)
    if last > depth:
        return f"recompute ends at layer {last}, and the model has {depth}"
    tokens = sum(fixed.get("slices", ()))
    if tokens and tokens != job.batch.length:
        return f"slices hold {tokens} tokens, and a sample has {job.batch.length}"
    if fixed.get("offload") and not job.cluster.copies:
        return "offload was decided, and the cluster has no figure for copies to the host"
    levels, has = fixed.get("hierarchy"), _units(job)
    if isinstance(levels, tuple) and levels != has:
        told = f"nodes of {has[0]} ranks and sites of {has[1]} nodes"
        return f"hierarchy {list(levels)} was decided, and the cluster has {told}"
    cuts, chunks = fixed.get("cuts", ()), layout.stages * layout.virtual
    if cuts and sum(cuts) != depth:
        return f"cuts {list(cuts)} hold {sum(cuts)} layers, and the model has {depth}"
    if cuts and len(cuts) != chunks:
        return f"cuts {list(cuts)} are {len(cuts)} chunks, and {chunks} are wanted"
    stage = fixed.get("zero_stage", 0)
    if stage > 1 and job.limits.engine == "megatron":
        return f"Megatron's distributed optimizer is ZeRO 1, and {stage} was decided"
    if reason := _no_mesh(job, layout):
        return reason
    if stage > 1 and layout.stages > 1:
        return f"DeepSpeed's pipelines have ZeRO 0 and 1, and {stage} was decided"
    return None


def _no_mesh(job: PlannedJob, layout: Layout) -> str | None:
    """Say why the engine cannot have the stage, shards or stays that the user has fixed."""
    fixed = job.limits.fixed
    shards, stage = fixed.get("shards", 1), fixed.get("zero_stage", 3)
    if job.limits.engine != "fsdp2":
        theirs = shards > 1 or fixed.get("stays")
        return "shards and stays are fully_shard's: add --engine fsdp2" if theirs else None
    if stage != 3:
        return f"fully_shard is ZeRO 3, and {stage} was decided"
    known = (1, *mesh_sizes(job, layout))
    if shards not in known:
        shown = ", ".join(map(str, known))
        return f"shards can be {shown} (1: no mesh), whole nodes, and {shards} was decided"
    return None


def _other(job: PlannedJob, layout: Layout, names: tuple[str, ...]) -> str:
    """Name the fixed values that ``layout`` does not have, in a sentence."""
    missed = [name for name in names if not _fixed(job, layout, (name,))]
    shown = ", ".join(f"{name}={job.limits.fixed[name]}" for name in missed)
    return f"none that is possible has {shown}, as was decided"


def _whole(job: PlannedJob, cut: Layout) -> Iterator[Layout]:
    """Yield ``cut`` with every ZeRO stage, offload and hierarchy, whole and in token slices."""
    for zero_stage in _zero_stages(job, cut):
        for offload in _offloads(job, cut, zero_stage):
            for hierarchy in _levels(job, cut):
                found = cut.replace(zero_stage=zero_stage, offload=offload, hierarchy=hierarchy)
                if offload and zero_stage == 3:
                    found = found.replace(ratio=float(job.limits.fixed.get("ratio", 1.0)))
                yield found
                yield from (found.replace(knobs=knobs) for knobs in _knobs(job, found))
                if not offload:
                    copied = [found.replace(hpz=n, copy=what) for n, what in _copies(job, found)]
                    if _keeps_frozen(job, found):
                        copied.append(found.replace(frozen="device"))
                    copied += _meshes(job, found)
                    yield from copied
                    if _sums_in_nodes(job, found):
                        yield from (one.replace(accumulate="node") for one in (found, *copied))
                yield from (found.replace(slices=slices) for slices in _slices(job, found))


def _knobs(job: PlannedJob, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yield ZeRO 3's settings as decided, or those from which they are searched (``tiers``)."""
    given = job.limits.fixed.get("knobs")
    if given and layout.zero_stage == 3:
        yield tuple(given)
    elif searches_gathers(job, layout):
        yield TIGHT


def searches_gathers(job: PlannedJob, layout: Layout) -> bool:
    """Return whether ZeRO 3's settings are searched: where states may be on the host at all."""
    asked = job.limits.fixed.get("offload", job.limits.offload and not job.on_cpu)
    here = job.limits.engine == "deepspeed" and layout.zero_stage == 3 and layout.innermost == 1
    free = "knobs" not in job.limits.fixed and layout.hpz == 1
    return bool(asked) and here and free and layout.size("replicas") > 1


def _copies(job: PlannedJob, layout: Layout) -> Iterator[tuple[int, Copy]]:
    """Yield ranks of a node with a kind of its secondary copy; nothing where hpZ is impossible."""
    ranks, parts = layout.size("replicas"), (layout.innermost, layout.context, layout.expert)
    nodes, _ = job.groups.of(layout, "replicas")
    if job.limits.engine not in UNCUT_ENGINES or layout.zero_stage != 3 or parts != (1, 1, 1):
        return
    if nodes < 2 or ranks % nodes or ranks == nodes:
        return
    yield ranks // nodes, "native"
    if job.dtype.itemsize == 2:  # the codec of steps takes bf16 and fp16
        yield ranks // nodes, "exact"
        yield ranks // nodes, "bits8"


def _meshes(job: PlannedJob, layout: Layout) -> Iterator[Layout]:
    """Yield FSDP2's other ways: HSDP meshes, and gathered parameters that stay until backward."""
    if job.limits.engine != "fsdp2" or layout.zero_stage != 3 or layout.hierarchy is not True:
        return
    for shards in (1, *mesh_sizes(job, layout)):
        yield from (layout.replace(shards=shards, stays=stays) for stays in (False, True)
                    if stays or shards > 1)  # fmt: skip


def _keeps_frozen(job: PlannedJob, layout: Layout) -> bool:
    """Return whether ZeRO 3 gathers frozen weights under adapters, which ranks may keep instead."""
    gathers = layout.zero_stage == 3 and layout.size("replicas") > 1
    adapted = any(0 < layer.frozen < 1 for layer in job.layers(layout))
    return gathers and adapted and job.limits.engine in UNCUT_ENGINES


def _sums_in_nodes(job: PlannedJob, layout: Layout) -> bool:
    """Return whether micro-batches can be summed inside of nodes of several ranks (DeepSpeed)."""
    several = layout.accumulation > 1 and layout.zero_stage >= 2 and layout.hierarchy
    nodes, _ = job.groups.of(layout, "replicas")
    ranks = layout.size("replicas")
    here = layout.stages == layout.expert == 1 and job.limits.engine in UNCUT_ENGINES
    return bool(several) and here and 1 < nodes < ranks and ranks % nodes == 0


def _slices(job: PlannedJob, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yield token slices of a pipeline, none where another degree cuts tokens."""
    cuts_tokens = layout.context > 1 or layout.virtual > 1 or layout.expert > 1
    if not job.limits.owns("slices") or layout.stages == 1 or cuts_tokens:
        return
    given = job.limits.fixed.get("slices")
    for slices in (tuple(given),) if given else sliced(job, layout):
        whole = sum(slices) == job.batch.length and len(slices) > 1
        if whole and job.model.refuses(job.shape(layout.replace(slices=slices))) is None:
            yield slices


def _levels(job: PlannedJob, layout: Layout) -> tuple[bool | tuple[int, int], ...]:
    """Return the values of ``hierarchy`` to try: no more levels than a group of replicas spans."""
    if "hierarchy" in job.limits.fixed:
        given = job.limits.fixed["hierarchy"]
        return (given if isinstance(given, tuple) else bool(given),)
    nodes, sites = job.groups.of(layout, "replicas")
    found: list[bool | tuple[int, int]] = [True]
    if 1 < nodes < layout.size("replicas"):
        found.append(False)
    if 1 < sites < nodes:
        found.append(_units(job))
    return tuple(found)


def _units(job: PlannedJob) -> tuple[int, int]:
    """Return ranks of a node and nodes of a site (0: there are none), as a block's hierarchy."""
    return job.cluster.ranks_per_node, job.cluster.nodes_per_site


def _unfit(job: PlannedJob, layout: Layout) -> str | None:
    """Say why the engine or the model does not allow ``layout``; None if both do."""
    engine = job.limits.engine
    if engine == "fsdp2" and not layout.is_uncut:
        return "fully_shard cuts no layer, and has no stages"
    if layout.stages > job.model.depth:
        return "more stages than layers"
    ulysses = layout.context > 1 and layout.context_way == "ulysses"
    if layout.stages > 1 and ulysses and engine == "deepspeed":
        return "DeepSpeed's Ulysses has no pipeline"
    if layout.context > 1 and engine == "neox":
        return "GPT-NeoX has no context parallelism"
    if layout.expert > 1 and (layout.stages > 1 and engine != "megatron"):
        return "DeepSpeed's experts have no pipeline"
    if layout.mesh > 1:
        return None  # micro-batches are not known yet
    reason = job.model.refuses(job.shape(layout))
    return None if reason is None else UNCUT + reason


def _sequences(job: PlannedJob, layout: Layout) -> bool:
    """Return whether sequence parallelism is possible beside tensor parallelism."""
    if job.limits.engine != "megatron" or layout.tensor == 1:
        return False
    return job.model.refuses(job.shape(layout.replace(sequence=True))) is None


def _virtual(job: PlannedJob, layout: Layout, accumulation: int) -> tuple[int, ...]:
    """Return how many chunks per stage to try: only Megatron interleaves, in whole rounds."""
    if job.limits.engine != "megatron" or layout.stages == 1 or accumulation % layout.stages:
        return (1,)
    blocks = job.model.depth - 2
    return tuple(count for count in VIRTUAL if count == 1 or not blocks % (layout.stages * count))


def _zero_stages(job: PlannedJob, layout: Layout) -> tuple[int, ...]:
    """Return the stages of ZeRO that the engine has beside the other degrees."""
    if "zero_stage" in job.limits.fixed:
        return (int(job.limits.fixed["zero_stage"]),)
    if layout.size("replicas") == 1:
        return (0,)
    if job.limits.engine == "megatron" or layout.stages > 1:
        return (0, 1)
    if job.limits.engine == "fsdp2":
        return (3,)
    return (0, 1, 2) if layout.innermost > 1 else (0, 1, 2, 3)


def _offloads(job: PlannedJob, layout: Layout, zero_stage: int) -> tuple[bool, ...]:
    """Return the values of ``offload`` to try: ZeRO-Offload, without a pipeline.

    A CPU's memory is its host's: the search does not propose offload there, as it saves nothing.
    """
    possible = job.limits.engine == "deepspeed" and zero_stage >= 1 and layout.stages == 1
    asked = job.limits.fixed.get("offload", job.limits.offload and not job.on_cpu)
    return (False, True) if asked and possible and job.cluster.copies else (False,)
