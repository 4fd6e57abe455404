"""Optimizer offload in plans: chosen if memory is short, native or encoded, and its files."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.channels.offload.pinned_receive_buffers import LONG_NUMEL
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.answer import files
from hybridcomp.tools.plan.answer.report import codecs, details
from hybridcomp.tools.plan.answer.start_command import left_to_user
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calls import Price
from hybridcomp.tools.plan.cost.copies import MOST_NUMEL, Copying, Whole, whole_of
from hybridcomp.tools.plan.cost.gathers import ModelPass
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import kept_by_codecs
from hybridcomp.tools.plan.cost.predict import predicted
from hybridcomp.tools.plan.cost.prices import Prices
from hybridcomp.tools.plan.cost.work import StageWork, price, work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.models.model import BatchShape
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Batch, Found, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.search import search
from tests.selection import by_day
from tests.tools.plan.clusters import cluster, small
from tests.tools.plan.search.test_planning import best_of_all

BATCH_SHAPE = BatchShape(1, 128, 2)
EIGHT = {"codec": "blockint", "bits": 8}
BUDGET = AllowedChoices.parse({"offload": EIGHT})
BATCH = Batch(32, 128)
FAST = {"blockint": {"gbytes_per_second": 100.0}, "expcode": {"gbytes_per_second": 100.0}}


def machines(bus: float = 0.5, memory_gb: float = 10.0, **more: Any) -> Cluster:
    """Return two GPUs with a shared host, whose codecs are known unless ``more`` says otherwise."""
    found = {"device": "a GPU", "host": {"gbytes_per_second": bus}, "host_codecs": FAST, **more}
    return cluster(1, 2, gbits=100.0, memory_gb=memory_gb, **found)


def planned(
    memory_gb: float, bus: float = 0.5, budget: AllowedChoices = BUDGET, **more: Any
) -> Found:
    fixed = {"tensor": 1, "stages": 1, "zero_stage": 2}
    limits = SearchLimits(offload=True, recompute=False, keep=3, fixed=fixed)
    return search(small(blocks=8), machines(bus, memory_gb, **more), budget, BATCH, limits)


@functools.cache
def tight() -> float:
    """Return GB that only a layout with an offloaded optimizer fits."""
    fixed = {"tensor": 1, "stages": 1, "zero_stage": 2}
    limits = SearchLimits(recompute=False, keep=20, fixed=fixed)
    roomy = search(small(blocks=8), machines(), BUDGET, BATCH, limits)
    least = min(plan.prediction.device_nbytes for plan in roomy.plans)
    return 0.9 * least / 0.92e9


def test_too_little_memory_puts_the_optimizer_on_the_host() -> None:
    plenty = planned(10.0)
    assert not plenty.plans[0].layout.offload
    short = tight()
    plan = planned(short).plans[0]
    assert plan.layout.offload and plan.prediction.memory["host"] > 0
    assert plan.prediction.device_nbytes <= 0.92e9 * short
    told = plan.prediction
    assert not plan.choices["offload", "backward"].native  # a bus of 0.5 GB/s makes 8 bits pay
    assert not plan.choices["offload", "forward"].native
    assert told.nbytes["offload"] < 0.6 * told.native_nbytes["offload"]
    native = planned(short, budget=AllowedChoices.parse("native")).plans[0]
    assert native.layout.offload and "offload" not in native.block
    assert native.prediction.seconds > told.seconds
    assert native.prediction.nbytes["offload"] == native.prediction.native_nbytes["offload"]


BOTH = AllowedChoices.parse({"offload": [EIGHT, {"codec": "expcode"}], "dp": EIGHT})


def few_of(bus: float, share: float) -> Cluster:
    """Return hosts that copy and encode, with and without spare memory."""
    return machines(bus, share * tight() / 0.9, host_codecs={
        "blockint": {"gbytes_per_second": 5.0}, "expcode": {"gbytes_per_second": 0.5},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("bus", "share"),
    by_day([(0.1, 0.7), (0.1, 2.0), (5.0, 0.7), (5.0, 2.0)], [(0.1, 0.7), (5.0, 2.0)]),
)
def test_the_best_of_all_is_found_among_them(bus: float, share: float) -> None:
    few = few_of(bus, share)
    for stage in (1, 2):
        fixed: dict[str, Any] = {"context": 1, "virtual": 1, "stages": 1, "zero_stage": stage}
        limits = SearchLimits(offload=True, recompute=False, keep=3, most_micro_batch=4,
                              fixed=fixed)  # fmt: skip
        found = search(small(blocks=8), few, BOTH, BATCH, limits)
        best, _ = best_of_all(PlannedJob(small(blocks=8), few, BATCH, limits), BOTH)
        seconds = found.plans[0].prediction.seconds
        assert seconds == pytest.approx(best[small(blocks=8).depth,], rel=1e-9)


def seconds_of(plan: Plan) -> float:
    return plan.prediction.seconds


@pytest.mark.parametrize(
    ("bus", "share"),
    by_day([(0.1, 0.7), (5.0, 0.7), (5.0, 1.1)], [(0.1, 0.7), (5.0, 1.1)]),
)
def test_memory_goes_to_what_saves_most(bus: float, share: float) -> None:
    """No smaller share of states, with DeepSpeed's gathers or with none kept, is faster."""
    few = few_of(bus, share)
    fixed: dict[str, Any] = {"context": 1, "stages": 1, "zero_stage": 3, "offload": True}
    limits = SearchLimits(recompute=False, keep=1, most_micro_batch=4, fixed=fixed)
    (plan,) = search(small(blocks=8), few, BOTH, BATCH, limits).plans
    layout, told = plan.layout, plan.prediction
    assert told.device_nbytes <= 0.92 * few.ranks[0].nbytes
    others = []
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
        for knobs in ((0, 0, 0), (0, 10**9, 10**9)):
            given = replace(limits, fixed={**fixed, "ratio": ratio, "knobs": knobs})
            found = search(small(blocks=8), few, BOTH, BATCH, given).plans
            others += [seconds_of(one) for one in found if one.layout.knobs == knobs]
            assert all(one.layout.ratio == ratio for one in found)
    assert others and told.seconds <= min(others) * (1 + 1e-9)
    if bus == 5.0:
        assert layout.ratio < 1 and told.memory["optimizer"] > 0, "some states are on the device"
        assert layout.knobs and "of the optimizer's sub-groups" in " ".join(details(plan, few))


def test_sub_groups_and_gathers_are_deepspeeds(tmp_path: Path) -> None:
    """They are written as its keys, and searched again in the run."""
    fixed: dict[str, Any] = {"context": 1, "zero_stage": 3, "offload": True, "ratio": 0.5}
    limits = SearchLimits(keep=1, fixed=fixed)
    (plan,) = search(small(blocks=8), few_of(5.0, 1.0), BOTH, BATCH, limits).plans
    files.write(plan, few_of(5.0, 1.0), tmp_path)
    config = json.loads((tmp_path / "ds_config.json").read_text())
    zero, layout = config["zero_optimization"], plan.layout
    assert zero["offload_optimizer"] == {"device": "cpu", "ratio": 0.5}
    assert zero["sub_group_size"] == layout.sub_group
    assert [zero[key] for key in files.KNOBS] == list(layout.knobs)
    assert CompressionConfig.parse(config["compression"]).memory.planned
    sizes = [10, 10, 30, 10, 40]
    model = ModelPass(tuple(((size,), True) for size in sizes), (), False)
    assert model.sub_group(2) == 2
    # the first of 3 sub-groups stays (20, 30 and 50 of 100 values, half on each of 2 ranks)
    assert model.on_host(2, 0.6, 8) == 0.8 and model.on_host(2, 0.7, 8) == 1.0
    assert model.on_host(2, 0.5, 0) == 1.0, "one sub-group by default"


def tiers(
    host_gb: float, drive: float, budget: str = "lossless", keep: int = 1
) -> tuple[Found, Cluster]:
    """Answer for two ranks whose host has ``host_gb``, and a drive of ``drive`` GB/s (0: none)."""
    more: dict[str, Any] = {"host_memory_gb": host_gb, "host_codecs": {
        "expcode": {"gbytes_per_second": 2.0}}}  # fmt: skip
    if drive:
        more["drive"] = {"gbytes_per_second": drive}
    machine = machines(5.0, 0.6 * tight() / 0.9, **more)
    fixed: dict[str, Any] = {"context": 1, "stages": 1, "zero_stage": 3, "offload": True}
    limits = SearchLimits(recompute=False, keep=keep, most_micro_batch=1, fixed=fixed)
    return search(small(blocks=8), machine, AllowedChoices.parse(budget), BATCH, limits), machine


def test_states_that_the_host_cannot_hold_go_to_its_drive(tmp_path: Path) -> None:
    (roomy,) = tiers(1.0, 1.0)[0].plans
    assert not roomy.layout.drive and roomy.prediction.memory["host"] > 0
    for host_gb, share in ((0.05, 0.58), (1e-9, 1.0)):
        found, machine = tiers(host_gb, 0.2, keep=5)
        plan = found.plans[0]
        for one in found.plans:  # those with DeepSpeed's own gathers, too
            values = one.prediction.memory["host"] / 12
            assert 2 * 16 * values <= 0.92e9 * host_gb * (1 + 1e-9), one.layout
        assert plan.layout.drive == pytest.approx(share, abs=0.01) and plan.layout.ratio == 1
        assert plan.prediction.seconds > roomy.prediction.seconds
        assert plan.block == {"offload": {"states": {"codec": "expcode"}}}
        assert Choices.of_block(plan.block) == plan.choices
        assert Plan.from_json(plan.to_json()).layout == plan.layout
        assert "states are on the drive" in " ".join(details(plan, machine))
        assert codecs(plan) == "offload states expcode()"
        base = {"zero_optimization": {"offload_optimizer": {"nvme_path": "/a drive"}}}
        (note,) = (one for one in left_to_user(plan, ("x",), {"optimizer": {}}))
        assert '"nvme_path": "/local_nvme": name a folder' in note
        assert not list(left_to_user(plan, ("x",), {"optimizer": {}, **base}))
        files.write(plan, machine, tmp_path, base)
        config = json.loads((tmp_path / "ds_config.json").read_text())
        offload = config["zero_optimization"]["offload_optimizer"]
        assert (offload["device"], offload["nvme_path"]) == ("nvme", "/a drive")
        assert offload["buffer_count"] == 12, "DeepSpeed's 4 fail an assertion in its first step"
        memory = CompressionConfig.parse(config["compression"]).memory
        # as a run divides it (patches.ds.planned_memory): whole sub-groups, 16 bytes a parameter
        numel, count = config["zero_optimization"]["sub_group_size"], 0
        while memory.host_gb is not None and 16 * numel * (count + 1) <= 1e9 * memory.host_gb / 2:
            count += 1
        assert (memory.host_gb or 0) <= 0.92 * host_gb and bool(count) == (host_gb > 0.01)
    nothing = tiers(0.05, 0.0)[0]
    assert not nothing.plans and "no drive takes the rest: measure or describe" in nothing.reason


def test_a_fast_drive_leaves_states_plain_and_a_slow_one_encodes_them() -> None:
    """Both by the cluster's figures: 16 bytes a parameter each way, encoded 0.64 of them."""
    (fast,), (slow,) = (tiers(1e-9, speed)[0].plans for speed in (100.0, 0.2))
    assert fast.choices["offload", "states"].native and not fast.block.get("offload")
    assert slow.choices["offload", "states"].codec is not None
    (plain,) = tiers(1e-9, 0.2, "native")[0].plans
    values = sum(layer.parameters for layer in small(blocks=8).layers(BATCH_SHAPE)) / 2
    gone = slow.prediction.exposed["offload"], plain.prediction.exposed["offload"]
    drive, coding = 32 * values / 0.1e9, 2 * 16 * values / 2e9
    assert gone[1] - gone[0] == pytest.approx(0.36 * drive - coding, rel=0.01)
    assert plain.prediction.nbytes["offload"] - slow.prediction.nbytes["offload"] == pytest.approx(
        0.36 * 32 * values, rel=0.01)  # fmt: skip


def test_hosts_that_code_slowly_leave_the_bus_native() -> None:
    slow = {"blockint": {"gbytes_per_second": 0.001}}
    plan = planned(tight(), bus=50.0, host_codecs=slow).plans[0]
    assert plan.layout.offload and plan.choices == Choices()


def test_unknown_hosts_leave_the_bus_native() -> None:
    """A GPU cluster that was measured before hosts were, or described without them."""
    plan = planned(tight(), host_codecs={}).plans[0]
    assert plan.layout.offload and plan.choices["offload", "backward"].native
    with pytest.raises(HybridcompError, match=r"no figure for blockint\(bits=8\) of bf16 \(decode"):
        choice = Choices.of_block({"offload": EIGHT})["offload", "backward"]
        copying = Copying("to_host", 1e6, 4e6)
        Prices(machines(host_codecs={})).of(copying, choice, torch.bfloat16)


def test_a_cpu_is_its_own_host() -> None:
    limits = SearchLimits(offload=True, keep=50, recompute=False)
    found = search(small(), cluster(1, 2), BUDGET, BATCH, limits)
    assert not any(plan.layout.offload for plan in found.plans)
    decided = SearchLimits(fixed={"offload": True}, keep=1)
    assert search(small(), cluster(1, 2), BUDGET, BATCH, decided).plans[0].layout.offload


def test_files_hold_the_blocks_offload(tmp_path: Path) -> None:
    plan = planned(tight()).plans[0]
    files.write(plan, machines(), tmp_path)
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    written = CompressionConfig.parse(config["compression"])
    codecs = written.codecs()
    assert str(codecs["offload", "backward"]) == str(codecs["offload", "forward"])
    assert written.offload.codec_of("backward") is not None
    some = plan.layout.replace(accumulation=4)
    for layout, sums in ((some, "device"), (some.replace(accumulation=1), "auto")):
        again = Plan(layout, plan.choices, *list(vars(plan).values())[2:])
        assert CompressionConfig.parse(again.block).offload.sums == sums
        assert Choices.of_block(again.block) == plan.choices


def stage_and_job(accumulation: int, bus: float) -> tuple[PlannedJob, Layout, StageWork]:
    layout = Layout(data=2, micro_batch=2, accumulation=accumulation, cuts=(10,), zero_stage=2,
                    offload=True)  # fmt: skip
    job = PlannedJob(small(blocks=8), machines(bus), Batch(4 * accumulation, 128), SearchLimits())
    return job, layout, work_of(job, layout).stages[0]


def test_gradients_land_behind_the_last_pass() -> None:
    job, layout, _ = stage_and_job(4, 0.5)
    work = work_of(job, layout)
    told = predicted(job, work, Choices.of_block({"offload": EIGHT}))
    native = predicted(job, work, Choices())
    assert native.hidden["offload"] < 1e-9 < told.hidden["offload"]
    assert told.low <= told.seconds <= told.high and told.exposed["offload"] > 0
    # the bus is a separate resource: gradients before the optimizer, parameters after it
    bus, device = (
        [span for span in native.spans if span.resource == name] for name in ("bus 0", "stage 0")
    )
    there, back = bus
    (adam,) = (span for span in device if span.name == "adam")
    assert (there.name, back.name) == ("to_host", "to_device")
    assert there.end == adam.start < adam.end == back.start


def test_parameters_on_a_cut_are_whole_on_both_sides() -> None:
    equal = (8.0,) * 4
    assert whole_of([(equal, 4)]) == whole_of([(equal, 2)]) == whole_of([((0.0,), 2)]) == Whole()
    assert whole_of([(equal, 8)]) == Whole(2.0, 2.0)
    # in 3 parts: one has 2 + 4, the others 4 and 4 + 1 + 2 and 2
    assert whole_of([((2.0, 4.0, 1.0, 2.0), 3)]) == Whole((6 + 4 + 3) / 9, 6 / 3)
    # rounding errors of floating point do not add to a parameter
    assert whole_of([((0.1,) * 30, 3)]).most == pytest.approx(1.0)
    assert whole_of([(equal, 4), ((6.0,), 2)]) == Whole(14 / 11, 14 / 11)


def test_sums_of_micro_batches_are_those_of_whole_parameters() -> None:
    """The case is ZeRO 2; the rank that moves the most bytes determines the time."""
    job, layout, stage = stage_and_job(3, 0.5)
    tensors = tuple(chain.from_iterable(layer.tensors for _, layer in stage.layers))
    whole = whole_of([(tensors, 2)])
    assert 1.01 < whole.mean < whole.most

    def moved(layout: Layout) -> Price:
        (there,) = [item for item in work_of(job, layout).stages[0].copies
                    if item.key == ("offload", "backward")]  # fmt: skip
        return price(job, there, Choices())

    owned, width = sum(tensors) / 2, 2
    assert moved(layout).nbytes == pytest.approx(owned * (4 + 5 * width * whole.mean))
    seconds = owned * (4 + 5 * width * whole.most) / 0.5e9
    assert moved(layout).inside.value == pytest.approx(seconds, rel=0.01)
    for other, each in ((1, 4.0), (3, 4 + 6 * width)):
        assert moved(layout.replace(zero_stage=other)).nbytes == pytest.approx(owned * each)
    assert moved(layout.replace(accumulation=1)).nbytes == pytest.approx(owned * 4)


def test_tied_weights_are_summed_once() -> None:
    model = replace(small(blocks=1, vocabulary=4000), tied=True)
    for more in (False, True):
        job = PlannedJob(replace(model, tied=more), machines(), Batch(4, 128), SearchLimits())
        layout = Layout(data=2, accumulation=2, cuts=(3,), zero_stage=2, offload=True)
        stage = work_of(job, layout).stages[0]
        sizes = [size for _, layer in stage.layers for size in layer.tensors]
        whole = whole_of([(tuple(sizes[:-1] if more else sizes), 2)])
        assert sum(sizes) - (sizes[-1] if more else 0) == stage.dense
        copied = sum(price(job, item, Choices()).nbytes for item in stage.copies)
        assert copied == pytest.approx(stage.dense / 2 * (4 + 6 * whole.mean + 2))


def test_payloads_are_no_longer_than_what_crosses_at_once() -> None:
    assert MOST_NUMEL == LONG_NUMEL
    job, layout, stage = stage_and_job(1, 0.5)
    encoded = Choices.of_block({"offload": EIGHT})
    longest = max(item.call.numel for item in stage.copies)
    kept = kept_by_codecs(job, layout, stage, encoded)["payloads"]
    assert kept == pytest.approx(2 * longest * 1.03, rel=0.02)


def test_the_optimizer_of_the_host_has_its_own_speed() -> None:
    one, two = (
        PlannedJob(small(), machines(host_memory_gbytes_per_second=speed), BATCH, SearchLimits())
        for speed in (1.0, 2.0)
    )
    assert one.adam(1e6, 0, on_host=True).value == 2 * two.adam(1e6, 0, on_host=True).value
    assert one.adam(1e6, 0).value == two.adam(1e6, 0).value
