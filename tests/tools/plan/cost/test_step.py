"""A simulated step: schedules, seconds and tasks against events, bytes against measured ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from doc_pages import speeds
from hybridcomp.tools.plan.choices import Choice, Choices
from hybridcomp.tools.plan.cost.blocking_pipeline import moves
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.predict import predicted
from hybridcomp.tools.plan.cost.prices import Prices, native_nbytes
from hybridcomp.tools.plan.cost.schedule import Op, Task, in_flight, order
from hybridcomp.tools.plan.cost.step import MOST_PASSES, sample, seconds_of, simulated, step_seconds
from hybridcomp.tools.plan.cost.times import Durations, Seconds, StageTimes, least_seconds
from hybridcomp.tools.plan.cost.work import Work, work_of
from hybridcomp.tools.plan.layout import Layout, even_cuts
from hybridcomp.tools.plan.request import Batch, SearchLimits
from tests.tools.plan.clusters import PlannedStep, cluster, small, step
from tests.tools.plan.cost.events import step_spans

RECOMMENDED = {"preset": "recommended"}


def test_orders_of_1f1b() -> None:
    def forward(number: int) -> Op:
        return Op(False, 0, number)

    def backward(number: int) -> Op:
        return Op(True, 0, number)

    assert order(1, 2, 1, 3) == (
        forward(0), backward(0), forward(1), backward(1), forward(2), backward(2),
    )  # fmt: skip
    assert order(0, 2, 1, 2) == (forward(0), forward(1), backward(0), backward(1))
    assert [in_flight(stage, 4, 1, 16) for stage in range(4)] == [4, 3, 2, 1]
    # Megatron's interleaved warm-up: twice the distance to the end, and a round for every chunk
    ops = order(0, 2, 2, 4)
    assert [op.backward for op in ops].index(True) == 2 * 1 + 2 + 1
    assert sorted(ops) == sorted(
        Op(back, chunk, n) for back in (False, True) for chunk in (0, 1) for n in range(4)
    )


def random_times(
    draw: random.Random, layout: Layout, micro: bool, blocking: bool = False
) -> tuple[StageTimes, ...]:
    def durations() -> Durations:
        compute = draw.uniform(1, 3)
        busy, sent = compute + draw.uniform(0, 1), draw.uniform(0, 0.5)
        return Durations(
            busy, sent, compute, sent * draw.choice([0.0, 0.4, 1.0]) if blocking else 0.0
        )

    def seconds() -> Seconds:
        return Seconds(draw.uniform(0, 1), draw.uniform(0, 4))

    return tuple(
        StageTimes(
            tuple(durations() for _ in range(layout.virtual)),
            tuple(durations() for _ in range(layout.virtual)),
            seconds() if micro else Seconds(0.0, 0.0), seconds(), draw.random(), seconds(),
            draw.choice([0.0, 0.3]), draw.choice([0.0, 2.0]), micro, blocking,
            landed=0.5 * layout.offload, uploaded=draw.random() * layout.offload,
        )
        for _ in range(layout.stages)
    )  # fmt: skip


def assert_events_say_so(layout: Layout, times: tuple[StageTimes, ...], count: int) -> None:
    """Check the step's duration, and each task's start and end, against the events."""
    tasks: list[Task] = []
    seconds = step_seconds(layout, times, count, tasks)
    assert seconds == step_seconds(layout, times, count), "tasks cost no seconds"
    told = sorted((one.what, one.resource, one.start, one.end) for one in tasks
                  if one.end > one.start)  # fmt: skip
    spans = sorted(span for span in step_spans(layout, times, count) if span[0] != "wait")
    assert [span[:2] for span in told] == [span[:2] for span in spans]
    for one, other in zip(told, spans, strict=True):
        assert one[2:] == pytest.approx(other[2:], rel=1e-12)
    whole = max(end for *_, end in spans)
    assert seconds == pytest.approx(whole, rel=1e-12)
    assert least_seconds(Work(layout, ()), times) <= whole * (1 + 1e-12)


def test_a_step_is_its_events() -> None:
    draw = random.Random(5)
    for index in range(30):
        stages, virtual = draw.randrange(1, 5), draw.choice([1, 1, 2])
        virtual = virtual if stages > 1 else 1
        count = stages * draw.randrange(1, 4)
        layout = Layout(
            stages=stages, virtual=virtual, accumulation=count, offload=index % 2 == 0
        )  # fmt: skip
        times = random_times(draw, layout, micro=index % 3 == 0)
        assert_events_say_so(layout, times, count)


def test_a_step_whose_stages_meet_is_its_events() -> None:
    draw = random.Random(7)
    for _ in range(30):
        stages, count = draw.randrange(2, 6), draw.randrange(1, 9)
        layout = Layout(stages=stages, accumulation=count)
        times = random_times(draw, layout, micro=False, blocking=True)
        assert_events_say_so(layout, times, count)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_stages_meet_as_deepspeeds_schedule_has_it(stages: int, micro_batches: int) -> None:
    """Every send, receive and pass of ``TrainSchedule``, in its order."""
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for stage in range(stages):
        upstream = schedule.TrainSchedule(micro_batches, stages, stage)
        kept: dict[int, int] = {}  # micro-batch of a buffer: the engine counts them itself
        said, ahead, behind = [], 0, 0
        for commands in upstream.steps():
            for command in commands:
                name, buffer = type(command).__name__, command.kwargs.get("buffer_id", -1)
                if name == "ForwardPass":
                    kept[buffer], ahead = ahead, ahead + 1
                    said.append(("pass", False, kept[buffer]))
                elif name == "BackwardPass":
                    said.append(("pass", True, kept[buffer]))
                    behind += 1
                elif name == "RecvActivation":
                    said.append(("receive", False, ahead))
                elif name == "RecvGrad":
                    said.append(("receive", True, behind))
                elif name in ("SendActivation", "SendGrad"):
                    said.append(("send", name == "SendGrad", kept[buffer]))
        own = moves(stage, stages, micro_batches)
        assert [(move.what, move.pass_.backward, move.pass_.micro_batch) for move in own] == said


def test_both_ways_of_two_stages_that_meet_come_one_after_the_other() -> None:
    """A stage's passes, then the gradient, then the activation, which waited for it."""
    layout = Layout(stages=2, accumulation=10)
    none = Seconds(0.0, 0.0)
    stage = StageTimes(
        (Durations(1.0, 0.25, 1.0, 0.125),), (Durations(2.0, 0.5, 2.0, 0.0),), none, none, 0.0,
        none, 0.0, 0.0, reduces=False, blocking=True,
    )  # fmt: skip
    first, second = (step_seconds(layout, (stage, stage), count) for count in (10, 11))
    assert second - first == pytest.approx(1.0 + 2.0 + 0.25 + 0.5)


@pytest.mark.parametrize("blocking", [False, True])
def test_long_steps_are_extrapolated(blocking: bool) -> None:
    draw = random.Random(6)
    for stages in (2, 4, 7):
        layout = Layout(stages=stages, accumulation=900 // stages)
        times = random_times(draw, layout, micro=False, blocking=blocking)
        assert sample(layout)[1] and 2 * stages * sample(layout)[0] < MOST_PASSES
        whole = step_seconds(layout, times, layout.accumulation)
        assert seconds_of(layout, times) == pytest.approx(whole, rel=0.002)


def apart(layout: Layout, block: Any = None) -> PlannedStep:
    """Return a step of ``layout`` with each rank on a node of its own."""
    return step(layout, cluster(layout.ranks, 1), block, bucket_numel=4e6)


#: layouts of the training benchmark: 1 rank per node, samples and tokens of a micro-batch
LAYOUTS = {
    "dp2": Layout(data=2, micro_batch=2, cuts=(6,)),
    "zero1": Layout(data=2, micro_batch=2, cuts=(6,), zero_stage=1),
    "zero2": Layout(data=2, micro_batch=2, cuts=(6,), zero_stage=2),
    "zero3": Layout(data=2, micro_batch=2, cuts=(6,), zero_stage=3),
    "tp2": Layout(tensor=2, micro_batch=2, cuts=(6,)),
    "pp2": Layout(stages=2, accumulation=4, cuts=(3, 3)),
    "dp2pp2": Layout(stages=2, data=2, accumulation=4, cuts=(3, 3)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("arm", ["native bf16", "recommended"])
def test_bytes_are_those_that_the_bench_has_measured(name: str, arm: str) -> None:
    """Against docs/results/speed.md: the interface's bytes, including TCP and Ethernet headers.

    For ZeRO 3 against docs/results/bytes.md: a host's bits per parameter, without headers.
    """
    if name == "zero3":
        measured = {"native bf16": 16.01, "recommended": 6.27}[arm] * 3_279_616 / 8e6
    else:
        measured = speeds.measured()[name, arm, 1.0]["sent_MB"]
    found = apart(LAYOUTS[name], RECOMMENDED if arm == "recommended" else None).told
    sent = sum(found.nbytes.values())
    ratio = 1e6 * measured / sent
    assert 0.99 < ratio < 1.01 if name == "zero3" else 1.0 < ratio < 1.09
    assert sum(found.native_nbytes.values()) >= sum(found.nbytes.values())
    assert found.job_nbytes.keys() == found.nbytes.keys()


def test_messages_cost_what_the_cluster_says() -> None:
    machines = cluster(nodes=2, ranks_per_node=2)
    prices = Prices(machines)
    call = EngineCall("all_reduce", 1e6, 4, 2, "all_reduce", levels=2)
    native = prices.of(call, Choice(), torch.bfloat16)
    assert native.nbytes == native.native_nbytes == 2 * 3 / 4 * 2e6
    assert native.coding.value == 0 and native.inside.value == 0
    bits_8 = Choice.of({"codec": "blockint", "bits": 8})
    flat = prices.of(EngineCall("all_reduce", 1e6, 4, 2, "all_reduce"), bits_8, torch.bfloat16)
    assert flat.nbytes / native.nbytes == pytest.approx(8.2578125 / 16)
    two_levels = prices.of(call, bits_8, torch.bfloat16)
    assert two_levels.wire.value < flat.wire.value and two_levels.inside.value > 0
    # small messages stay native, because of min_bytes
    small_one = EngineCall("all_reduce", 1000.0, 4, 2)
    assert prices.of(small_one, bits_8, torch.bfloat16).coding.value == 0
    assert native_nbytes("send", 10, torch.bfloat16, 2) == 20


def test_three_levels_send_least_over_uplinks() -> None:
    """Eight ranks, two sites of two nodes of two: the bytes that the collectives send over NCCL."""
    uplink = {"gbytes_per_second": 0.00625, "latency_us": 50}
    machines = cluster(4, 2, gbits=1.0, nodes_per_site=2, uplink=uplink)
    assert machines.sites_of(range(8)) == 2 and machines.sites_of(range(4)) == 1
    prices, bits_8 = Prices(machines), Choice.of({"codec": "blockint", "bits": 8})
    found = {}
    for levels in (1, 2, 3):
        call = EngineCall("all_reduce", 1e6, 8, 4, "all_reduce", levels=levels, sites=2)
        found[levels] = prices.of(call, bits_8, torch.float32)
    flat = prices.of(EngineCall("all_reduce", 1e6, 8, 4, sites=2), Choice(), torch.float32)
    assert found[3].seconds.value < found[2].seconds.value < found[1].seconds.value
    # a native ring over the slow uplink: 2 * 7 steps of an eighth, at 6.25 MB/s
    assert flat.wire.value == pytest.approx(14 * (4e6 / 8 / 6.25e6 + 50e-6), rel=1e-3)
    payload = 1e6 * 8.2578125 / 8
    # sites exchange a quarter's payload; 2 MB both ways in a node, then 1 MB between its nodes
    assert found[3].nbytes == pytest.approx(payload / 4 + 6e6)
    assert found[3].between_nbytes == pytest.approx(payload / 4 + 2e6)
    assert found[3].native_nbytes == flat.native_nbytes
    # a gather sends half of a quarter of the payload to the other site, half of the payloads
    # between the nodes of a site, and half of the values inside a node
    gather = EngineCall("all_gather", 1e6, 8, 4, None, levels=3, sites=2)
    gathered = prices.of(gather, bits_8, torch.float32)
    assert gathered.nbytes == pytest.approx(payload / 8 + payload / 4 + 2e6, rel=1e-4)
    assert gathered.between_nbytes == pytest.approx(payload / 8 + payload / 4, rel=1e-4)
    # without sites the third level equals the second
    plain = Prices(cluster(4, 2))
    same = [EngineCall("all_reduce", 1e6, 8, 4, "all_reduce", levels=n) for n in (2, 3)]
    assert len({plain.of(call, bits_8, torch.float32) for call in same}) == 1
    assert EngineCall("all_reduce", 1.0, 6, 4, levels=2).inside == [], "no grid: one level"


def test_prediction_of_a_pipeline() -> None:
    layout = Layout(stages=4, accumulation=8, cuts=even_cuts(6, 4))
    job, work, native, _ = apart(layout)
    encoded = apart(layout, RECOMMENDED).told
    assert encoded.nbytes["pp"] < native.nbytes["pp"] == encoded.native_nbytes["pp"]
    assert native.low <= native.seconds <= native.high and native.low < native.high
    assert native.codec_seconds == 0 < encoded.codec_seconds
    assert native.bubble_seconds > 0 and native.exposed["pp"] > 0
    assert encoded.exposed["pp"] < native.exposed["pp"]
    for span in native.spans:
        assert 0 <= span.start < span.end <= native.seconds * (1 + 1e-9)
    seconds, tasks = simulated(job, work, Choices())
    assert seconds == native.seconds == max(task.end for task in tasks)


def test_overlap_hides_a_part_of_the_gradients() -> None:
    layout = Layout(data=4, micro_batch=2, cuts=(6,))
    none, some = (
        predicted(job, work_of(job, layout), Choices())
        for job in (
            PlannedJob(small(), cluster(4, 1), Batch(8, 128), SearchLimits(), overlap=share)
            for share in (0.0, 0.2)
        )
    )  # fmt: skip
    passes = none.compute_seconds - apart(layout).work.stages[0].adam.value
    assert some.seconds == pytest.approx(none.seconds - 0.2 * passes, rel=1e-3)
    assert some.exposed["dp"] < none.exposed["dp"]


def test_offload_and_zero_3_are_slower_here_and_smaller() -> None:
    plain = Layout(data=2, micro_batch=2, cuts=(6,), zero_stage=2)
    host, three = plain.replace(offload=True), plain.replace(zero_stage=3)
    found = {layout: apart(layout).told for layout in (plain, host, three)}
    assert found[host].memory["host"] == found[plain].memory["optimizer"] > 0
    assert found[host].device_nbytes < found[plain].device_nbytes
    assert found[three].memory["weights"] < found[plain].memory["weights"]
    # a few parameters stay gathered until backward
    assert found[three].nbytes["zero"] == pytest.approx(found[plain].nbytes["zero"], rel=0.01)
