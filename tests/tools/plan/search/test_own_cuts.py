"""Sharding by hybridcomp.nn in the planner: rings, meshes and token slices."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import memory_of
from hybridcomp.tools.plan.cost.predict import predicted
from hybridcomp.tools.plan.cost.schedule import in_flight, order
from hybridcomp.tools.plan.cost.step import step_seconds
from hybridcomp.tools.plan.cost.times import least_seconds, stage_times
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.engines import can_recompute, recomputations
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.model import BatchShape
from hybridcomp.tools.plan.request import Batch, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.evaluate import Evaluator
from hybridcomp.tools.plan.search.placing import Placer
from hybridcomp.tools.plan.search.search import search
from hybridcomp.tools.plan.search.slicing import slice_lengths
from hybridcomp.tools.plan.search.space import layouts
from tests.tools.plan.clusters import cluster, small
from tests.tools.plan.cost.events import step_spans

OWN = ("ring", "tp2d", "slices")
EIGHT = {"codec": "blockint", "bits": 8}
BUDGET = AllowedChoices.parse({"dp": EIGHT, "pp": EIGHT, "tp2d": EIGHT, "cp": EIGHT})


def job(own: tuple[str, ...] = OWN, samples: int = 4, length: int = 512, **more: Any) -> PlannedJob:
    limits = SearchLimits(dtype="fp32", own=own, **more)
    return PlannedJob(small(), cluster(nodes=4, ranks_per_node=1), Batch(samples, length), limits)


def every(made: PlannedJob) -> list[Layout]:
    return list(layouts(made, Counter()))


def sent(made: PlannedJob, layout: Layout) -> dict[tuple[str, str], float]:
    """Return the values that a first-stage rank sends per forward and backward pass, by key."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for layer in made.layers(layout):
        for messages, way in ((layer.forward, "forward"), (layer.backward, "backward")):
            for item in made.layer_items(layout, 0, messages, way):  # type: ignore[arg-type]
                found[item.key] += item.count * item.call.numel
    return found


# ---- candidates


def test_own_cuts_are_proposed_where_the_script_knows_them() -> None:
    plain = every(job(()))
    assert not any(one.mesh > 1 or one.slices or one.context_way == "ring" for one in plain)
    found = every(job())
    assert set(plain) < set(found)
    assert {one.mesh for one in found} == {1, 2}
    for one in found:
        assert not one.slices or (one.stages > 1 and one.zero_stage < 2 and one.context == 1)
        assert sum(one.slices) in (0, 512)
        assert one.mesh == 1 or (one.tensor == one.stages == one.context == 1)
        assert one.mesh == 1 or (one.micro_batch % 2 == 0 and one.zero_stage < 3)
    rings = [one for one in found if one.context_way == "ring"]
    assert {one.context for one in rings} == {2, 4}
    assert any(one.stages > 1 for one in rings), "a ring goes with pipelines, Ulysses does not"


@pytest.mark.parametrize("engine", ["megatron", "neox"])
def test_no_other_engine_has_them(engine: str) -> None:
    found = every(job(engine=engine))
    assert not any(one.mesh > 1 or one.slices for one in found)
    assert all(one.context == 1 or one.context_way == "ring" for one in found)


def test_what_is_decided_is_proposed_alone() -> None:
    lengths = (300, 212)
    sliced = every(job((), fixed={"slices": lengths}))
    assert sliced and {one.slices for one in sliced} == {lengths}
    assert {one.mesh for one in every(job((), fixed={"mesh": 2}))} == {2}
    ring = every(job((), fixed={"context_way": "ring", "context": 2}))
    assert {one.context_way for one in ring} == {"ring"}
    with pytest.raises(ConfigError, match="own: found 'tree'; expected some of ring, tp2d, slices"):
        SearchLimits(own=("tree",))


# ---- messages, memory, time


def test_a_mesh_sends_the_blocks_of_every_product() -> None:
    """The table of docs/tp2d.md, divided by the ranks of the mesh."""
    made, layout = job(), Layout(mesh=2, micro_batch=4, cuts=(6,))
    hidden, between, words, tokens = 256, 1024, 270, 4 * 512
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, between), (between, hidden)]
    products = [*sizes * 4, (hidden, words)]
    values = sum(tokens * k for k, _ in products) / 4
    weights = sum(k * n for k, n in products) / 4
    table = words * hidden / 4
    assert sent(made, layout) == {
        ("tp2d", "activations"): 2 * values,
        ("tp2d", "weights"): 2 * weights + table,
        ("tp2d", "gradients"): values + weights + table,
    }


def test_a_mesh_keeps_a_quarter_and_computes_a_quarter() -> None:
    whole, part = (
        small(vocabulary=256).layers(BatchShape(4, 128, 4, mesh=mesh)) for mesh in (1, 2)
    )
    for one, two in zip(whole, part, strict=True):
        assert two.parameters == pytest.approx(one.parameters / 4)
        assert two.flops == pytest.approx(one.flops / 4)
        assert two.kept_nbytes == pytest.approx(one.kept_nbytes / 4, rel=0.1) or not one.flops
    made = job()
    memory = [
        sum(memory_of(made, work_of(made, layout), 0, Choices()).values())
        for layout in (Layout(micro_batch=4, cuts=(6,)), Layout(mesh=2, micro_batch=4, cuts=(6,)))
    ]
    assert memory[1] == pytest.approx(memory[0] / 4, rel=0.1)


def test_a_mesh_has_three_choices() -> None:
    block = {"tp2d": {"activations": EIGHT, "weights": {"codec": "expcode"},
                      "gradients": {"codec": "none"}}}  # fmt: skip
    choices = Choices.of_block(block)
    assert choices["tp2d", "weights"] == Choice.of("expcode")
    assert choices["tp2d", "gradients"].native
    assert Choices.of_block(choices.block()) == choices
    same = Choices.of_block({"tp2d": EIGHT})
    assert same.block() == {"tp2d": EIGHT}


def test_a_ring_sends_keys_twice_and_gradients_once() -> None:
    """docs/context_parallel.md: 2 (N - 1) P forward, 3/4 (N - 1) P backward on average."""
    made, layout = job(), Layout(context=4, context_way="ring", cuts=(6,))
    both = 4 * 2 * 256 * 512 / 4  # blocks, keys and values, hidden, tokens of a rank
    assert sent(made, layout) == {
        ("cp", "forward"): 2 * 3 * both, ("cp", "backward"): 0.75 * 3 * both,
    }  # fmt: skip
    ulysses = sent(made, layout.replace(context_way="ulysses"))
    assert ulysses["cp", "forward"] == ulysses["cp", "backward"] == 4 * 4 * 256 * 512 / 4


def test_slices_go_forward_and_come_back_in_reverse() -> None:
    found = [(op.backward, op.micro_batch) for op in order(0, 4, 1, 2, 3)]
    ahead, back = [(False, n) for n in range(3)], [(True, n) for n in (2, 1, 0)]
    later = [(way, n + 3) for way, n in (*ahead, *back)]
    assert found == [*ahead, *back, *later]
    assert in_flight(3, 4, 1, 8, 5) == 5


def test_slices_fill_a_pipeline_at_batch_one() -> None:
    """With free messages their passes follow the paper's formula; unsliced stages idle."""
    made = job(samples=1, length=4096)
    made = PlannedJob(
        made.model, cluster(nodes=4, ranks_per_node=1, gbits=1e6), made.batch, made.limits
    )
    whole = Layout(stages=4, cuts=(1, 2, 2, 1))
    sliced = whole.replace(slices=slice_lengths(made, whole, 8))
    assert sum(sliced.slices) == 4096
    assert list(sliced.slices) == sorted(sliced.slices, reverse=True)
    one, two = (predicted(made, work_of(made, layout), Choices()) for layout in (whole, sliced))
    times = stage_times(made, work_of(made, sliced), Choices())
    paper = sum(
        8 * max(part) + sum(part) - max(part)
        for part in (
            [own.forward[0].busy for own in times],
            [own.backward[0].busy for own in times],
        )
    )
    ends = max(own.adam + own.gather.both for own in times)
    assert two.seconds == pytest.approx(paper + ends, rel=0.05)
    assert two.seconds < 0.6 * one.seconds
    assert two.nbytes["pp"] == pytest.approx(one.nbytes["pp"])


def test_a_slice_travels_while_its_stage_goes_on() -> None:
    """The step's time is that of its events, and the bound holds."""
    for gbits, samples, count in itertools.product((0.01, 1.0), (1, 3), (2, 8)):
        made = job(samples=samples, length=1024)
        machines = cluster(nodes=4, ranks_per_node=1, gbits=gbits)
        made = PlannedJob(made.model, machines, made.batch, made.limits)
        layout = Layout(stages=4, cuts=(2, 1, 1, 2), accumulation=samples)
        work = work_of(made, layout.replace(slices=slice_lengths(made, layout, count)))
        times = stage_times(made, work, Choices())
        seconds = step_seconds(work.layout, times, samples)
        events = step_spans(work.layout, times, samples)
        assert max(end for *_, end in events) == pytest.approx(seconds)
        assert least_seconds(work, times) <= seconds * (1 + 1e-9)


def test_slices_keep_a_whole_sequence() -> None:
    made = job(samples=1)
    whole = Layout(stages=2, cuts=(3, 3))
    sliced = whole.replace(slices=slice_lengths(made, whole, 8))
    kept = [
        memory_of(made, work_of(made, layout), 0, Choices())["activations"]
        for layout in (whole, sliced)
    ]
    assert kept[0] < kept[1] < 1.6 * kept[0]


# ---- the search


def test_the_best_of_all_is_found_among_them() -> None:
    for gbits, samples in ((0.02, 2), (5.0, 1)):
        machines = cluster(nodes=4, ranks_per_node=1, gbits=gbits)
        limits = SearchLimits(dtype="fp32", own=OWN, keep=3, recompute=False)
        made = PlannedJob(small(), machines, Batch(samples, 512), limits)
        evaluator, best = Evaluator(made, BUDGET), float("inf")
        placer = Placer(made)
        for layout in layouts(made, Counter()):
            for work in placer.places(layout, False):
                keys = list(evaluator.options(work))
                options = [BUDGET.options(key, layout.zero_stage) for key in keys]
                for combination in itertools.product(*options):
                    choices = Choices.of(dict(zip(keys, combination, strict=True)))
                    best = min(best, evaluator.seconds(work, choices))
        found = search(small(), machines, BUDGET, made.batch, limits)
        assert found.plans[0].prediction.seconds == pytest.approx(best, rel=1e-9)


def test_one_long_sequence_wants_slices_or_a_ring() -> None:
    machines = cluster(nodes=4, ranks_per_node=1, gbits=1.0)
    limits = SearchLimits(dtype="fp32", own=("slices",), fixed={"stages": 4}, keep=3)
    plan = search(small(), machines, BUDGET, Batch(1, 4096), limits).plans[0]
    assert len(plan.layout.slices) >= 4 and not plan.layout.recompute
    # Ulysses sends less where it applies, which excludes stages
    limits = SearchLimits(dtype="fp32", own=("ring",), fixed={"stages": 2}, keep=3)
    found = search(small(), machines, BUDGET, Batch(1, 4096), limits)
    assert found.plans[0].layout.context == 2
    assert found.plans[0].layout.context_way == "ring"
    assert "DeepSpeed's Ulysses has no pipeline" in found.refused


# ---- recomputation that an engine can run


def test_megatron_recomputes_heads_of_chunks_or_segments_of_all() -> None:
    layout, blocks = Layout(stages=2, cuts=(4, 3)), range(1, 6)
    found = set(recomputations("megatron", layout, blocks))
    assert ((1, 2), (4, 5)) in found and ((1, 2), (2, 3), (3, 4), (4, 5), (5, 6)) in found
    assert ((1, 3), (3, 4), (4, 6)) in found
    for asked, can in ((((1, 2), (4, 5)), True), (((2, 3), (4, 5)), False), (((1, 2),), False)):
        assert can_recompute("megatron", layout.replace(recompute=asked), blocks) is can
    virtual = Layout(stages=2, virtual=2, cuts=(3, 2, 2, 2))
    assert ((1, 2), (3, 4), (5, 6), (7, 8)) in recomputations("megatron", virtual, range(1, 8))
    # its first stage has two modules before the blocks, its last one three after them
    every_one = tuple((n, n + 1) for n in blocks)
    pairs, three = ((1, 3), (3, 4), (4, 6)), ((2, 4),)
    assert list(recomputations("neox", layout, blocks)) == [every_one, pairs, three]


def test_recomputation_that_an_engine_cannot_run_is_told() -> None:
    fixed = {"stages": 2, "recompute": ((2, 3),)}
    limits = SearchLimits(engine="megatron", fixed=fixed)
    found = search(small(), cluster(2, 1), BUDGET, Batch(8, 128), limits)
    assert not found.plans
    assert any("Megatron recomputes the first layers" in why for why in found.refused)


def test_levels_are_tried_where_a_group_spans_nodes_or_sites() -> None:
    limits = SearchLimits(dtype="fp32")
    both = every(PlannedJob(small(), cluster(2, 2), Batch(8, 128), limits))
    assert {one.hierarchy for one in both if one.data == 4} == {True, False}
    assert {one.hierarchy for one in both if one.data == 2 and one.tensor == 2} == {True}
    uplink = {"gbytes_per_second": 0.01}
    machines = cluster(nodes=4, ranks_per_node=2, nodes_per_site=2, uplink=uplink)
    found = every(PlannedJob(small(), machines, Batch(8, 128), limits))
    assert {one.hierarchy for one in found if one.data == 8} == {True, False, (2, 2)}
    assert {one.hierarchy for one in found if one.data == 4 and one.tensor == 2} == {True, (2, 2)}
    assert {one.hierarchy for one in found if one.size("replicas") == 2} == {True}
    given = SearchLimits(dtype="fp32", fixed={"hierarchy": (2, 2)})
    fixed = every(PlannedJob(small(), machines, Batch(8, 128), given))
    assert {one.hierarchy for one in fixed} == {(2, 2)}
    other, refused = SearchLimits(dtype="fp32", fixed={"hierarchy": (2, 4)}), Counter[str]()
    assert not list(layouts(PlannedJob(small(), machines, Batch(8, 128), other), refused))
    assert any("nodes of 2 ranks and sites of 2 nodes" in why for why in refused), refused
