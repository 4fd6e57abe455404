"""The whole search: optimal among all layouts, within memory, for unequal devices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import KEYS
from hybridcomp.tools.plan.algorithms import dag_partition
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import device_nbytes, memory_of
from hybridcomp.tools.plan.cost.step import step_of
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.engines import can_recompute
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.traced import named
from hybridcomp.tools.plan.request import Batch, Found, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.placing import Placer
from hybridcomp.tools.plan.search.search import search
from tests.selection import by_day
from tests.tools.plan.clusters import cluster, small

RECOMMENDED = AllowedChoices.parse("recommended")
BATCH = Batch(16, 128)


def every_layout(job: PlannedJob) -> Iterator[Layout]:
    """Yield all layouts on two or four ranks, with up to 4 samples per pass, nothing recomputed.

    They are enumerated here, without the search's space, placer or evaluator.
    """
    engine, depth, ranks = job.limits.engine, job.model.depth, len(job.cluster.ranks)
    for tensor, stages in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        if tensor * stages > ranks:
            continue
        data = ranks // tensor // stages
        most = (
            0 if data == 1 else 1 if engine == "megatron" or stages > 1 else 2 if tensor > 1 else 3
        )
        sequences = (False, True) if engine == "megatron" and tensor > 1 else (False,)
        hosts = (False, True) if job.limits.offload and stages == 1 else (False,)
        free = itertools.product(range(most + 1), sequences, (1, 2, 4), hosts)
        cut = itertools.combinations(range(1, depth), stages - 1)
        for borders, (zero_stage, sequence, size, offload) in itertools.product(cut, free):
            cuts = tuple(b - a for a, b in itertools.pairwise((0, *borders, depth)))
            wanted = job.limits.fixed.get("zero_stage", zero_stage) == zero_stage
            if wanted and (zero_stage or not offload):
                yield Layout(tensor, sequence, stages, cuts=cuts, data=data, zero_stage=zero_stage,
                             micro_batch=size, accumulation=job.batch.samples // data // size,
                             offload=offload)  # fmt: skip


def best_of_all(
    job: PlannedJob, budget: AllowedChoices
) -> tuple[dict[tuple[int, ...], float], int]:
    """Return by cuts the fastest of all layouts and choices; and how many do not fit."""
    best: dict[tuple[int, ...], float] = {}
    refused = 0
    for layout in every_layout(job):
        sends = {"dp": layout.data > 1, "zero": layout.zero_stage > 0, "tp": layout.tensor > 1,
                 "pp": layout.stages > 1, "offload": layout.offload}  # fmt: skip
        keys = [key for key in KEYS if sends.get(key[0])]
        work = work_of(job, layout)
        for some in itertools.product(*(budget.options(key, layout.zero_stage) for key in keys)):
            choices = Choices.of(dict(zip(keys, some, strict=True)))
            needs = (memory_of(job, work, stage, choices) for stage in range(layout.stages))
            if max(map(device_nbytes, needs)) > job.capacity:
                refused += 1
            else:
                seconds = step_of(job, work, choices)
                best[layout.cuts] = min(best.get(layout.cuts, seconds), seconds)
    return best, refused


#: two links, ample and little memory; 8 bits or native, so that all combinations can be tried
SMALL_BUDGET = AllowedChoices.parse(
    {name: {"codec": "blockint", "bits": bits}
     for name, bits in (("dp", 4), ("zero", 8), ("tp", 8), ("pp", 8))}
)  # fmt: skip


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
@pytest.mark.parametrize(
    ("gbits", "memory_gb"),
    by_day([(0.05, 1.0), (5.0, 1.0), (0.2, 0.05)], [(0.05, 1.0), (0.2, 0.05)]),
)
def test_the_best_of_all_is_found(engine: Any, gbits: float, memory_gb: float) -> None:
    """Exactly for given cuts; near the optimum (see below) if the search chooses them."""
    machines = cluster(nodes=4, ranks_per_node=1, gbits=gbits, memory_gb=memory_gb)
    fixed: dict[str, Any] = {"context": 1, "virtual": 1}
    limits = SearchLimits(engine=engine, most_micro_batch=4, recompute=False, fixed=fixed)
    best, refused = best_of_all(PlannedJob(small(), machines, BATCH, limits), SMALL_BUDGET)
    assert bool(refused) == (memory_gb < 1), "the third one has too little memory for some"
    for cuts in ((6,), (3, 3), (2, 4), (2, 1, 1, 2)):
        given = replace(limits, fixed={**fixed, "stages": len(cuts), "cuts": cuts})
        plans = search(small(), machines, SMALL_BUDGET, BATCH, given).plans
        seconds = plans[0].prediction.seconds if plans else None
        assert seconds == pytest.approx(best.get(cuts), rel=1e-9), cuts
    found = search(small(), machines, SMALL_BUDGET, BATCH, limits)
    least = min(best.values())
    assert least * (1 - 1e-9) <= found.plans[0].prediction.seconds <= 1.04 * least


def test_plans_are_ranked_and_the_same_each_time() -> None:
    machines = cluster(nodes=4, ranks_per_node=1, gbits=0.2, memory_gb=0.05)
    limits = SearchLimits(most_micro_batch=4)
    found = search(small(), machines, SMALL_BUDGET, BATCH, limits)
    seconds = [plan.prediction.seconds for plan in found.plans]
    assert seconds == sorted(seconds) and len({plan.layout for plan in found.plans}) > 3
    assert search(small(), machines, SMALL_BUDGET, BATCH, limits) == found
    for plan in found.plans:
        CompressionConfig.parse(plan.block)
        assert plan.layout.samples == BATCH.samples and plan.layout.ranks == 4
        assert sum(plan.layout.cuts) == small().depth


def first(gbits: float, budget: AllowedChoices = RECOMMENDED, **fixed: object) -> Found:
    machines = cluster(nodes=4, ranks_per_node=1, gbits=gbits)
    return search(small(), machines, budget, BATCH, SearchLimits(fixed=fixed, keep=1))


def test_a_slow_link_is_worth_a_codec() -> None:
    native, encoded = (first(0.05, AllowedChoices.parse(name), tensor=1, stages=1)
                       for name in ("native", "recommended"))  # fmt: skip
    assert encoded.plans[0].prediction.seconds < 0.7 * native.plans[0].prediction.seconds
    lossless = first(0.05, AllowedChoices.parse("lossless"), tensor=1, stages=1).plans[0]
    assert all(one.codec is not None and one.codec.lossless for _, one in lossless.choices)
    assert lossless.prediction.seconds <= native.plans[0].prediction.seconds
    assert not first(100.0).plans[0].choices.items, "a fast link is not"


def test_what_the_user_has_decided_stays() -> None:
    found = first(1.0, tensor=2, stages=2, zero_stage=0, cuts=(3, 3)).plans[0]
    assert (found.layout.tensor, found.layout.stages, found.layout.cuts) == (2, 2, (3, 3))


def test_a_graph_too_wide_to_be_split_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dag_partition, "MOST_IDEALS", 4)
    model = named("tests.tools.plan.models.test_models:towers")
    limits = SearchLimits(dtype="fp32", fixed={"stages": 2})
    found = search(model, cluster(2, 1), RECOMMENDED, Batch(4, 8), limits)
    assert not found.plans and found.nearest is None
    assert "no layout of 2 ranks is possible: a graph of 5 nodes" in found.reason
    assert "too wide to be split exactly" in found.reason


def test_a_rank_half_as_fast_gets_fewer_layers() -> None:
    machines = cluster(nodes=4, ranks_per_node=1, gbits=10.0, speeds={2: 0.5})
    limits = SearchLimits(fixed={"stages": 4}, keep=1)
    model = small(blocks=14)
    plan = search(model, machines, RECOMMENDED, Batch(32, 128), limits).plans[0]
    cuts = plan.layout.cuts
    assert cuts[2] == min(cuts) and cuts[2] <= 0.7 * max(cuts)
    even = SearchLimits(fixed={"stages": 4, "cuts": (4, 4, 4, 4)}, keep=1)
    evenly = search(model, machines, RECOMMENDED, Batch(32, 128), even).plans[0]
    assert evenly.prediction.seconds > 1.25 * plan.prediction.seconds


@pytest.mark.parametrize("engine", ["deepspeed", "megatron", "neox"])
def test_half_the_memory_switches_recomputation_on(engine: Any) -> None:
    """As the engine can recompute."""
    fixed = {"stages": 2, "tensor": 1, "micro_batch": 16}
    limits, model = SearchLimits(engine=engine, fixed=fixed, keep=3), small(blocks=7)
    plenty = cluster(nodes=2, ranks_per_node=1, memory_gb=10.0)
    batch = Batch(128, 128)
    free = search(model, plenty, RECOMMENDED, batch, limits).plans[0]
    assert not free.layout.recompute
    need = free.prediction.device_nbytes
    half = cluster(nodes=2, ranks_per_node=1, memory_gb=0.55 * need / 0.92e9)
    room = 0.92 * half.ranks[0].nbytes
    tight = search(model, half, RECOMMENDED, batch, limits)
    assert tight.plans[0].layout.recompute
    assert tight.plans[0].prediction.seconds > free.prediction.seconds
    for plan in tight.plans:
        assert can_recompute(engine, plan.layout, plan.repeated)
        assert max(plan.prediction.memory_by_stage) <= room


def test_memory_is_never_crossed() -> None:
    draw, recomputed = random.Random(7), 0
    for _ in range(6):
        memory = draw.uniform(0.02, 0.12)
        machines = cluster(nodes=4, ranks_per_node=1, memory_gb=memory, gbits=draw.uniform(0.05, 5))
        limits = SearchLimits(keep=3, most_micro_batch=4)
        found = search(small(), machines, RECOMMENDED, BATCH, limits)
        for plan in found.plans:
            assert plan.prediction.device_nbytes <= 0.92 * machines.ranks[0].nbytes
            assert plan.prediction.device_nbytes == pytest.approx(
                max(plan.prediction.memory_by_stage)
            )
            recomputed += bool(plan.layout.recompute)
    assert recomputed


def test_what_no_plan_meets_is_told() -> None:
    tiny = cluster(nodes=2, ranks_per_node=1, memory_gb=0.001)
    found = search(small(), tiny, RECOMMENDED, BATCH)
    assert not found.plans and found.nearest is not None
    assert found.nearest.what == "memory" and found.nearest.needed > found.nearest.available
    assert found.reason.startswith("no plan fits: the leanest of")
    assert f"{found.nearest.needed / 1e9:.3g} GB" in found.reason
    more = search(small(), tiny, RECOMMENDED, BATCH, SearchLimits(ranks=8))
    assert "8 ranks are wanted, and the cluster has 2" in more.reason
    odd = search(small(), tiny, RECOMMENDED, Batch(1, 128), SearchLimits(fixed={"data": 2}))
    assert "cannot be divided among the replicas" in odd.reason


def test_graphs_are_split_by_their_ideals() -> None:
    model = named("tests.tools.plan.models.test_models:wide_towers")
    machines = cluster(nodes=2, ranks_per_node=1, gbits=1000.0)
    limits = SearchLimits(dtype="fp32", fixed={"stages": 2}, keep=1)
    plan = search(model, machines, RECOMMENDED, Batch(8, 1), limits).plans[0]
    assert sorted(sum(plan.layout.nodes, ())) == [0, 1, 2, 3, 4]
    assert plan.layout.nodes and plan.layout.cuts == tuple(map(len, plan.layout.nodes))
    assert Layout.from_json(plan.layout.to_json()) == plan.layout


@pytest.mark.parametrize(
    ("engine", "gbits", "slow"),
    by_day(
        [*itertools.product(("deepspeed", "megatron"), (0.05, 1.0), ({}, {1: 0.5}))],
        [("deepspeed", 0.05, {1: 0.5}), ("megatron", 0.05, {})],
    ),
)
def test_cuts_are_near_the_fastest_simulated_ones(
    engine: Any, gbits: float, slow: dict[int, float]
) -> None:
    """Also if messages take as long as layers: both ends of a cut wait for them."""
    layout, blocks = Layout(stages=3, micro_batch=2, accumulation=8), 6
    machines = cluster(nodes=3, ranks_per_node=1, gbits=gbits, speeds=slow)
    limits = SearchLimits(dtype="fp32", engine=engine, recompute=False)
    job = PlannedJob(small(blocks), machines, Batch(16, 128), limits)

    def seconds(cuts: tuple[int, ...]) -> float:
        return step_of(job, work_of(job, layout.replace(cuts=cuts)), Choices())

    every = [
        (one, two - one, blocks + 2 - two)
        for one, two in itertools.combinations(range(1, blocks + 2), 2)
    ]
    found = Placer(job)._cut(layout, None, False)
    assert found is not None and seconds(found.cuts) <= 1.04 * min(map(seconds, every))
