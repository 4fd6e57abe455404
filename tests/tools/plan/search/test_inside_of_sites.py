"""Plans that also encode sums between the nodes of a site, if these links are slow."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import KEYS
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.prices import Prices
from hybridcomp.tools.plan.cost.step import step_of
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Batch, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.evaluate import options_of
from hybridcomp.tools.plan.search.search import search
from tests.tools.plan.clusters import cluster, small

BATCH = Batch(16, 128)
BITS_8, BITS_4 = ({"codec": "blockint", "bits": bits} for bits in (8, 4))
HIERARCHIES: tuple[bool | tuple[int, int], ...] = (True, False, (2, 2))
BUDGET = AllowedChoices.parse({"dp": [BITS_4, BITS_8], "zero": BITS_8})
FIXED: dict[str, Any] = {"data": 8, "micro_batch": 2, "cuts": (6,)}


def sites(gbits: float, uplink: float) -> Cluster:
    """Return two sites of two nodes of two ranks; ``gbits`` of a node, ``uplink`` of a site."""
    return cluster(
        4, 2, gbits=gbits, nodes_per_site=2, uplink={"gbytes_per_second": 0.125 * uplink}
    )


@pytest.mark.parametrize(
    ("gbits", "uplink", "levels"),
    [(0.2, 0.02, [2, {"size": 2, **BITS_8}]), (20.0, 0.05, [2, 2]), (0.2, 100.0, None)],
)
def test_the_best_of_all_is_found(gbits: float, uplink: float, levels: Any) -> None:
    """Among all values of hierarchy and all choices, enumerated here."""
    machines, limits = sites(gbits, uplink), SearchLimits(dtype="fp32", fixed=FIXED)
    job = PlannedJob(small(), machines, BATCH, limits)
    best: list[tuple[float, str]] = []
    for stage, hierarchy in itertools.product(range(4), HIERARCHIES):
        layout = Layout(data=8, zero_stage=stage, micro_batch=2, cuts=(6,), hierarchy=hierarchy)
        work = work_of(job, layout)
        keys = [key for key in KEYS if key[0] == "dp" or (key[0] == "zero" and stage)]
        options = [BUDGET.options(key, stage) for key in keys]
        options[0] += tuple(Choice.of({**setting, "inside": True}) for setting in (BITS_4, BITS_8))
        for some in itertools.product(*options):
            choices = Choices.of(dict(zip(keys, some, strict=True)))
            best.append((step_of(job, work, choices), str(choices.block(hierarchy=hierarchy))))
    (first, *_) = search(small(), machines, BUDGET, BATCH, limits).plans
    assert first.prediction.seconds == pytest.approx(min(best)[0], rel=1e-9)
    found = first.block.get("hierarchy")
    assert found == levels if levels is not None else not isinstance(found, list)
    CompressionConfig.parse(dict(first.block))
    again = Plan.from_json(json.loads(json.dumps(first.to_json())))
    assert again.choices == first.choices and again.block == first.block
    assert ("8 bits inside of sites" in str(first.choices["dp", "forward"])) == (
        isinstance(levels, list) and levels[1] != 2
    )


def test_prices_of_encoded_sums_inside() -> None:
    """Messages between nodes take 8 bits instead of fp32; all other bytes are unchanged."""
    prices = Prices(sites(0.2, 0.05))
    call = EngineCall("all_reduce", 1e6, 8, 4, "all_reduce", levels=3, sites=2)
    plain, own = (
        prices.of(call, Choice.of({**BITS_8, **more}), torch.float32)
        for more in ({}, {"inside": True})
    )
    # half of a node's chunk of 500,000 values goes to the other node
    assert plain.nbytes - own.nbytes == pytest.approx(250_000 * (4 - 8.2578125 / 8))
    assert own.wire.value < plain.wire.value and own.coding.value > plain.coding.value
    assert own.inside == plain.inside
    two = EngineCall("all_reduce", 1e6, 8, 4, "all_reduce", levels=2, sites=2)
    known = [
        prices.of(two, Choice.of({**BITS_8, **more}), torch.float32)
        for more in ({}, {"inside": True})
    ]
    assert known[0] == known[1], "two levels have no such sums"


@pytest.mark.parametrize(
    "budget", [{"dp": 0.02}, {"dp": "lossless"}, {"dp": BITS_4}, {"zero": BITS_8}, "native"]
)
def test_budgets_that_do_not_allow_them(budget: Any) -> None:
    job = PlannedJob(small(), sites(0.2, 0.05), BATCH, SearchLimits(dtype="fp32"))
    allowed = AllowedChoices.parse(budget)
    assert not any(one.inside for one in options_of(job, allowed, ("dp", "forward"), 1))
    flat = PlannedJob(small(), cluster(4, 2), BATCH, SearchLimits(dtype="fp32"))
    assert not any(one.inside for one in options_of(flat, BUDGET, ("dp", "forward"), 1))
    recommended = AllowedChoices.parse("recommended")
    some = [one for one in options_of(job, recommended, ("dp", "forward"), 1) if one.inside]
    assert len(some) == 2, "8 bits, and 4 with feedback"
