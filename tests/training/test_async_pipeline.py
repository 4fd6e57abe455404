"""Flushless pipelines: recurrences, versions, staleness, checkpoints, data, errors."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from hybridcomp.patches.ds import record
from tests.nn.async_pipeline import simulation
from tests.ranks import RankPool, RunRanks, Trained
from tests.selection import by_day
from tests.training import async_trainer
from tests.training.async_trainer import AsyncJob, AsyncOutcome
from tests.training.in_turn import in_turn

#: name -> training, simulation
RECURRENCES: dict[str, tuple[AsyncJob, simulation.Maker]] = {
    "pipedream": (AsyncJob({"versions": "stash"}), simulation.Simulation),
    "pipedream of 4": (AsyncJob({"versions": "stash"}, 4), simulation.Simulation),
    "recomputed": (AsyncJob({"versions": "stash"}, checkpoint=True), simulation.Simulation),
    "recomputed, newest": (AsyncJob({"versions": 1}, checkpoint=False), simulation.Newest),
    "with slack": (AsyncJob({"versions": "stash", "slack": 1}, 4), simulation.Simulation),
    "2bw": (AsyncJob({"versions": 2}, 4), simulation.TwoVersions),
    "newest": (AsyncJob({"versions": 1}), simulation.Newest),
    "newest of 2": (AsyncJob({"versions": 1}, 2), simulation.Newest),
    "error feedback": (
        AsyncJob({"versions": 2, "correction": "error_feedback"}, 3),
        simulation.ErrorFeedback,
    ),
    "look ahead": (
        AsyncJob({"versions": "stash", "correction": "look_ahead"}, rate=0.2),
        simulation.Nesterov,
    ),
    "pipemare": (
        AsyncJob({"versions": 1, "correction": "pipemare", "anneal": 10}),
        simulation.PipeMare,
    ),
    "spike": (
        AsyncJob({"versions": 1, "correction": "spike"}, momentum=0.8, rate=0.02),
        simulation.Spike,
    ),
}
#: cases for two stages: others run the same code; and by day
TWICE = ["pipedream", "2bw", "newest", "error feedback", "look ahead", "pipemare", "spike"]
DAY = ["pipedream", "2bw", "error feedback", "pipemare"]


def held(job: AsyncJob, ahead: int) -> int:
    """Return how many versions a stage may hold, ``ahead`` stages before the last."""
    assert job.pipeline is not None
    versions = job.pipeline["versions"]
    return ahead + 1 if versions == "stash" else versions


def late(job: AsyncJob, ahead: int) -> int:
    assert job.pipeline is not None
    return 1 if job.pipeline["versions"] == 2 else -(-ahead // job.micro_batches)


@pytest.mark.parametrize(
    ("stages", "names"),
    by_day([(2, TWICE), (4, [*RECURRENCES]), (2, DAY)], [(2, DAY)]),
    ids=["2", "4", "day"],
)
def test_recurrences(module_ranks: RunRanks, stages: int, names: list[str]) -> None:
    """Each equals its single-process simulation after 20 steps, within its bounds."""
    rows = {name: RECURRENCES[name] for name in names}
    jobs = [job for job, _ in rows.values()]
    outcomes = module_ranks(stages, async_trainer.run, stages, jobs)
    for index, (name, (job, make)) in enumerate(rows.items()):
        expected = make(job, stages).run()
        synchronous = simulation.Simulation(replace(job, micro_batches=10**6), stages)
        for stage, outcome in enumerate(rank[index] for rank in outcomes):
            (found,) = outcome.weights
            error = float((found - expected[stage]).abs().max())
            assert error < 1e-10, f"{name}, stage {stage}: {error}"
            ahead = (stages - 1 - stage) * (1 + (job.pipeline or {}).get("slack", 0))
            assert outcome.most_held <= held(job, ahead), f"{name}, stage {stage}"
            assert outcome.staleness == late(job, ahead), f"{name}, stage {stage}"
            row = {"staleness": outcome.staleness, "held": outcome.most_held, "drains": 0}
            assert outcome.row == row, "what the ledger reports"
            assert not torch.equal(found, synchronous.weights[stage][0])


BF16 = {"bf16": {"enabled": True}}
ZERO1 = {**BF16, "zero_optimization": {"stage": 1}}
SCHEDULER = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 4},
    }
}


def test_drains(module_ranks: RunRanks, tmp_path: Path) -> None:
    """A run resumed from a checkpoint equals a run that starts from it; no data is lost."""
    settings = {"versions": "stash", "correction": "look_ahead"}
    full = AsyncJob(settings, 2, steps=9, save_at=5, optimizer="adamw", config=SCHEDULER)
    evaluated = AsyncJob({"versions": 2}, 2, steps=6, evaluate_at=3)
    spoiled = replace(evaluated, evaluate_at=6)
    flush = replace(evaluated, pipeline=None)
    ended = replace(evaluated, evaluate_at=0, batches=12)
    grown = AsyncJob({"versions": "stash"}, 2, steps=6, grow_at=3)
    jobs = [full, replace(full, resume=True), evaluated, spoiled, flush, ended]
    jobs += [grown, replace(grown, evaluate_at=3)]
    for outcomes in module_ranks(2, async_trainer.run, 2, jobs, str(tmp_path)):
        whole, resumed, one, other, synchronous, last, *more = outcomes
        assert torch.equal(whole.weights[0], resumed.weights[0])
        assert whole.losses[5:] == resumed.losses
        # equal until the evaluation; the batch after it has no late gradient
        assert one.losses[:3] == other.losses[:3]
        assert one.losses[3] != other.losses[3]
        assert one.evaluations != other.evaluations
        assert len(synchronous.evaluations) == 1
        assert last.losses == other.losses  # data that ends with the last step
        assert more[0].losses == more[1].losses  # another number of micro-batches drains, too


BASE = AsyncJob(
    {"versions": 2}, 4, steps=16, optimizer="adamw", dtype=torch.float32, rate=0.02,
    config={"gradient_clipping": 1.0},
)  # fmt: skip
ENCODED = {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0}
LOOKS = {"versions": "stash", "correction": "look_ahead", "momentum": 0.5}
FEEDS = {"versions": 2, "correction": "error_feedback"}
#: two stages, two replicas
OTHERS = {
    "flush": replace(BASE, pipeline=None),
    "clipping": BASE,
    "encoded": replace(BASE, block=ENCODED),
    "bf16": replace(BASE, config={**BF16, "gradient_clipping": 1.0}, dtype=torch.bfloat16),
    "ZeRO 1": replace(BASE, config=ZERO1, dtype=torch.bfloat16),
    "ZeRO 1, encoded": replace(BASE, config=ZERO1, dtype=torch.bfloat16, block=ENCODED,
                               pipeline=LOOKS),
    "ZeRO 1, feedback": replace(BASE, config=ZERO1, dtype=torch.bfloat16, pipeline=FEEDS),
}  # fmt: skip


@pytest.fixture(scope="module")
def four() -> Iterator[Trained]:
    with Trained(4, partial(async_trainer.run, 2)) as trained:
        yield trained


@pytest.mark.parametrize("name", by_day(OTHERS, ["encoded", "ZeRO 1, encoded"]))
def test_other_engines(four: Trained, name: str) -> None:
    """Mixed precision, ZeRO 1, clipping, replicas and encoded messages train as with a flush."""
    outcomes: list[AsyncOutcome] = four(OTHERS[name])
    assert outcomes[0].losses[-1] < 0.8 * outcomes[0].losses[0]
    for one, two in ((0, 1), (2, 3)):  # replicas
        assert torch.equal(outcomes[one].weights[0], outcomes[two].weights[0])


def test_encoded_is_close(four: Trained) -> None:
    native, lossy = (four(OTHERS[name])[0].losses for name in ("clipping", "encoded"))
    assert native != lossy
    assert abs(native[-1] / lossy[-1] - 1) < 0.05


def test_no_stage_waits_in_a_step(module_ranks: RunRanks) -> None:
    """Norms, clipping and the loss use no collectives across stages; a flush has several."""
    silent = {"ledger": {"every": 10**9, "sample_every": 0}}
    clipped = {"gradient_clipping": 1.0}
    base = AsyncJob({"versions": 2}, 2, steps=3, block=silent, optimizer="adamw", config=clipped)
    jobs = [
        replace(base, dtype=torch.float32),
        replace(base, dtype=torch.bfloat16, config={**BF16, **clipped}),
        replace(base, dtype=torch.bfloat16, config={**ZERO1, **clipped}),
        replace(base, dtype=torch.float32, pipeline=None),
    ]
    for outcomes in module_ranks(2, async_trainer.run, 2, jobs):
        *waitless, flush = [outcome.collectives for outcome in outcomes]
        assert waitless == [0, 0, 0]
        assert flush >= 3


def test_a_stage_that_fails_ends_the_others() -> None:
    """No stage waits forever for its messages."""
    job = AsyncJob({"versions": "stash"}, 2, steps=9, break_at=4)
    with RankPool(2) as pool, pytest.raises(AssertionError) as raised:
        pool.run(async_trainer.run, 2, [job], grace=60.0)
    text = str(raised.value)
    assert "the last stage breaks" in text
    assert "rank 0 of 2" in text


def is_freed(job: AsyncJob) -> bool:
    """Return whether an engine is collected once it is destroyed and deleted."""
    engine, batches = async_trainer.engine_of(job, 2), async_trainer.data(job)
    for _ in range(2):
        engine.train_batch(batches)
    known = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    return known() is None


def freed() -> list[bool]:
    jobs = [AsyncJob({"versions": versions}, 2, steps=6) for versions in ("flush", "stash")]
    return in_turn(jobs, is_freed, lambda job: False)


def test_passes_under_way_do_not_keep_a_destroyed_engine(module_ranks: RunRanks) -> None:
    for flush, stash in module_ranks(2, freed):
        assert stash == flush  # DeepSpeed keeps that of the last stage


def recorded(folder: Path) -> None:
    """Record a training with and without a flush, with an evaluation between."""
    for versions in ("flush", "stash"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(record.ENVIRONMENT, str(folder / versions))
            patched.setattr(record, "_recorded", False)
            async_trainer.run(2, [AsyncJob({"versions": versions}, 2, steps=9, evaluate_at=3)])


def test_records_name_the_data_of_a_step_and_not_what_was_read(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    module_ranks(2, recorded, tmp_path)
    flush, stash = (
        [json.loads(line)["run"] for line in (tmp_path / name).read_text().splitlines()
         if '"run"' in line]
        for name in ("flush", "stash")
    )  # fmt: skip
    assert set(flush[-1]["data"]) == {"first_batch", "first_batches"}
    assert stash == flush


def test_reverted(module_ranks: RunRanks) -> None:
    """Without the patches DeepSpeed's schedule runs, and continues with prefetched data."""
    flush = AsyncJob(None, 2, steps=6)
    before = AsyncJob({"versions": "stash", "correction": "look_ahead"}, 2, steps=6, revert_at=0)
    warm = AsyncJob({"versions": "stash", "correction": "look_ahead", "warmup": 6}, 2, steps=6)
    midway = replace(before, pipeline={"versions": "stash"}, revert_at=3)
    jobs = [flush, before, warm, midway, replace(midway, evaluate_at=3)]
    for native, reverted, warmed, halfway, drained in module_ranks(2, async_trainer.run, 2, jobs):
        for other in (reverted, warmed):
            assert torch.equal(native.weights[0], other.weights[0])
            assert native.losses == other.losses
        assert halfway.losses == drained.losses
        assert torch.equal(halfway.weights[0], drained.weights[0])
