"""Islands under DeepSpeed: each stage, exactness if lossless, and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import io
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.patches.ds import island_unit
from hybridcomp.patches.ds.zero import partitions
from hybridcomp.session import saved_session
from hybridcomp.session.engine_session import session_of
from hybridcomp.sync import checkpoint_state
from tests.publishing.made import NIGHTLY
from tests.ranks import RankPool, run_ranks
from tests.selection import by_day
from tests.sync.jobs import inside
from tests.training.trainer import (
    Job,
    batch,
    ds_config,
    make_engine,
    parameters,
    train_step,
)

SGD = {"type": "SGD", "params": {"lr": 0.05}}
LOCAL = inside(preset="local-sgd", every=1)


def flat(engine: Any) -> torch.Tensor:
    return torch.cat([one.float().flatten() for one in parameters(engine).values()])


def meetings_of(engine: Any) -> Any:
    """Return the meetings of an engine's islands, in its job or between jobs."""
    session = session_of(engine)
    assert session is not None
    (found,) = session.followers.stateful
    return found


def _told(job: Job, text: str) -> str:
    return f"{job}: {text}"


def spoil_padding(optimizer: Any) -> None:
    """Write NaN past the end of each stage 3 partition, where upstream never writes."""
    spoiled = 0
    for flat_group, group in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
    ):
        start = 0
        for parameter in group:
            stop = start + parameter.partition_numel()
            padding = flat_group.data[start + partitions.filled(parameter) : stop]
            padding.fill_(math.nan)
            spoiled += padding.numel()
            start = stop
    # the model has a parameter of one element, and an island has two ranks
    assert spoiled or dist.get_rank() % 2 == 0


def every_step(jobs: list[Job]) -> None:
    """Islands that meet every step, with SGD inside and outside, equal a single native job."""
    for job in jobs:
        plain = replace(job, ds_json={"optimizer": SGD, "gradient_clipping": 0.0})
        found = []
        for block in (None, LOCAL):
            one = replace(plain, block=block)
            engine = make_engine(one)
            if job.stage == 3:
                spoil_padding(engine.optimizer)
            for step in range(4):
                train_step(engine, one, step)
            found.append(flat(engine))
            engine.destroy()
        atol = 1e-6 if job.dtype == "fp32" else 1e-2
        msg = functools.partial(_told, job)
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=atol, msg=msg)


@pytest.mark.parametrize("stage", by_day(range(4), [1, 3]))
def test_every_step_is_the_native_job(stage: int) -> None:
    jobs = [Job(stage=stage, accumulation=2), Job(stage=stage, dtype="bf16")]
    run_ranks(4, every_step, jobs, timeout=600.0)


def unpadded() -> None:
    """Neither send nor change the padding after a stage 3 partition's weights."""
    from hybridcomp.patches.ds import island_unit

    engine = make_engine(Job(stage=3, dtype="bf16", block=LOCAL))
    masters = island_unit.masters_of(engine)
    (flat,) = engine.optimizer.fp32_partitioned_groups_flat
    before = flat.clone()
    masters.exchange(0, masters.numel, torch.full((masters.numel,), 7.0), [])
    padded = flat != 7.0
    assert int(padded.sum()) == flat.numel() - masters.numel
    unlike = flat[padded].view(torch.int32) != before[padded].view(torch.int32)  # maybe NaN
    assert not bool(unlike.any())
    assert bool((masters.read(0, masters.numel) == 7.0).all())
    numel = torch.tensor([masters.numel])
    torch.distributed.all_reduce(numel)
    # each of two islands holds all weights, and some partitions are padded
    assert int(numel) == 2 * sum(parameter.ds_numel for parameter in engine.module.parameters())
    padding = torch.tensor([flat.numel() - masters.numel])
    torch.distributed.all_reduce(padding)
    assert int(padding) > 0
    engine.destroy()


def test_padding_of_stage_3_is_not_sent() -> None:
    run_ranks(4, unpadded, timeout=600.0)


def digests_without(stage: int) -> list[str]:
    """Return the digests of weights of islands that freeze one of three equal layers."""
    found = []
    for frozen in range(2):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        trained = [p for n, p in model.named_parameters() if not n.startswith(str(frozen))]
        model[frozen].requires_grad_(False)
        engine = make_engine(Job(stage, "bf16", block=ADAM), model, [{"params": trained}])
        found.append(island_unit.masters_of(engine).digest)
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day([0, 1, 3], [1]))
def test_islands_that_train_other_layers_have_other_weights(stage: int) -> None:
    for first, second in run_ranks(2, digests_without, stage):
        assert first != second


def dealt() -> None:
    """Distribute data over all ranks of the job; scripts do not see an island's layout."""
    import deepspeed

    job = Job(stage=1, block=LOCAL)
    make_engine(job).destroy()
    model, data = torch.nn.Linear(1, 1), torch.utils.data.TensorDataset(torch.arange(64.0)[:, None])
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=ds_config(job), training_data=data
    )
    assert engine.mpu is None
    seen = torch.tensor(list(loader.data_sampler))  # workers would be children of a daemon
    every = [torch.empty_like(seen) for _ in range(4)]
    torch.distributed.all_gather(every, seen)
    assert torch.cat(every).sort().values.tolist() == list(range(64))
    with pytest.raises(ConfigError, match=r"sync: found deepspeed.initialize\(..., mpu=...\)"):
        deepspeed.initialize(model=model, config=ds_config(job), mpu=object())
    engine.destroy()


def test_training_data_goes_to_all_ranks() -> None:
    run_ranks(4, dealt, timeout=600.0)


#: first loss scale, a power of 2, halved by every overflow
SCALED = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1000}


def overflowing(stage: int) -> tuple[int, float, dict[str, float], str, torch.Tensor]:
    """Train two islands in fp16; the second's loss overflows in its fourth step."""
    told = inside(1, preset="local-sgd", every=2)
    job = Job(stage, "fp16", block=told, ds_json={"fp16": SCALED})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = make_engine(job)
        for step in range(6):
            values, targets = batch(dist.get_rank(), step, torch.float16)
            loss = (engine(values) - targets).float().square().mean()
            engine.backward(loss * (1e6 if step == 3 and dist.get_rank() else 1.0))
            engine.step()
    row = meetings_of(engine).row()
    scale = float(engine.optimizer.loss_scale)
    return engine.skipped_steps, scale, row, said.getvalue(), flat(engine)


@pytest.mark.parametrize("stage", by_day(range(4), [1]))
def test_an_overflow_in_one_island_is_its_own_affair(stage: int) -> None:
    one, other = run_ranks(2, overflowing, stage)
    assert (one[0], other[0]) == (0, 1) and (one[1], other[1]) == (256.0, 128.0)
    for _, _, row, _, weights in (one, other):
        assert (row["meetings"], row["skipped"]) == (3.0, 0.0)
        assert bool(weights.isfinite().all())
    assert torch.equal(one[4], other[4])  # the sixth step was a meeting
    scale = ", goes on with a loss scale of 128" if stage else ""  # 0 scales no loss in 0.19
    words = f"sync: step 4: island 1 skips its step for an overflow{scale}, and meets the others"
    assert words in other[3] and "overflow" not in one[3].lower()


def after_islands() -> None:
    """Reject an engine beside one with islands; after that one's end it gets the whole job."""
    one = inside(1, preset="local-sgd", every=1)
    first = make_engine(Job(stage=1, block=one))
    assert first.dp_world_size == 1
    plain = Job(stage=1, block={"dp": "bf16", "min_bytes": 0})
    with pytest.raises(ConfigError, match="sync: found an engine without islands; .* destroy that"):
        make_engine(plain)
    first.destroy()
    second = make_engine(Job(stage=1, block=one))
    first.destroy()  # as Python does when it collects an engine late
    with pytest.raises(ConfigError, match="an engine without islands"):
        make_engine(plain)
    second.destroy()
    engine = make_engine(plain)
    assert engine.dp_world_size == 2
    engine.destroy()


def test_an_engine_without_islands_is_not_cut_into_those_of_another() -> None:
    run_ranks(2, after_islands)


ADAM = inside(1, preset="streaming", every=3, delay=2, fragments=2)


def resumed(stage: int, folder: Path) -> None:
    """Save between two meetings, with one in flight; the resumed run is bit-identical."""
    job = Job(stage=stage, dtype="bf16", block=ADAM)
    engine = make_engine(job)
    for step in range(4):
        train_step(engine, job, step)
    engine.save_checkpoint(str(folder), "four")
    for step in range(4, 9):
        train_step(engine, job, step)
    whole = flat(engine)
    engine.destroy()
    again = make_engine(job)
    again.load_checkpoint(str(folder))
    for step in range(4, 9):
        train_step(again, job, step)
    assert torch.equal(flat(again), whole)
    again.destroy()


@pytest.mark.parametrize("stage", by_day([0, 2, 3], [2]))
def test_a_resumed_run_is_the_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    run_ranks(2, resumed, stage, tmp_path, timeout=600.0)


def saved(folder: Path) -> None:
    job = Job(stage=2, block=ADAM)
    engine = make_engine(job)
    for step in range(7):
        train_step(engine, job, step)
    engine.save_checkpoint(str(folder))
    engine.destroy()


def taken_over(folder: Path) -> None:
    job = Job(stage=2, block=ADAM)
    engine = make_engine(job)
    engine.load_checkpoint(str(folder))
    session, meetings = session_of(engine), meetings_of(engine)
    assert session is not None
    session.before_step()
    stored = [
        torch.load(path) for path in sorted(folder.glob("global_step7/hybridcomp_sync_rank_*.pt"))
    ]
    assert meetings.clock == 7 and not meetings.under_way
    for index, part in enumerate(meetings.parts):
        states = [one["parts"][index] for one in stored]
        assert torch.equal(part.fragment.start, states[0]["start"])
        assert part.fragment.momentum is not None
        assert torch.equal(part.fragment.momentum, states[0]["momentum"])
        left = [state["residual"] for state in states if state["residual"] is not None]
        left += [kept for state in states for _, kept, _ in state["under_way"] if kept is not None]
        total = sum(left, torch.zeros_like(part.fragment.start))
        assert part.fragment.residual is not None and bool(total.any())
        torch.testing.assert_close(part.fragment.residual, total / len(stored))
    for step in range(7, 10):
        train_step(engine, job, step)
    session.save(folder / "again")
    saved_session.read(session, folder / "again")  # after a change of the number of ranks
    engine.destroy()


def damaged(folder: Path) -> None:
    engine = make_engine(Job(stage=2, block=ADAM))
    with pytest.raises(
        CheckpointError, match=r"rank 1: .*hybridcomp_sync_rank_00001.pt is damaged"
    ):
        engine.load_checkpoint(str(folder))
    engine.destroy()


def test_other_numbers_of_islands_take_over(tmp_path: Path) -> None:
    run_ranks(3, saved, tmp_path, timeout=600.0)
    assert sorted(path.name for path in tmp_path.glob("island_*")) == ["island_1", "island_2"]
    run_ranks(4, taken_over, tmp_path, timeout=600.0)
    with RankPool(2) as pool:
        pool.run(taken_over, tmp_path)
        (path,) = tmp_path.glob("global_step7/hybridcomp_sync_rank_00001.pt")
        path.write_bytes(path.read_bytes()[:-100])
        pool.run(damaged, tmp_path)


def test_folders_of_an_earlier_save_with_more_islands_are_not_loaded(tmp_path: Path) -> None:
    """Two islands have saved again what three had: the third's folder is of another run."""
    for index in range(3):
        Path(island_unit.island_folder(str(tmp_path), index), "tag").mkdir(parents=True)
    for rank in range(4):
        checkpoint_state.path_of(tmp_path / "tag", rank).touch()
    found = []
    for index in range(3):
        islands = SimpleNamespace(index=index, width=2)
        engine = SimpleNamespace(**{island_unit.ATTRIBUTE: SimpleNamespace(islands=islands)})
        found.append(island_unit.saved_folder(engine, str(tmp_path), "tag"))
    assert found == [str(tmp_path), f"{tmp_path}/island_1", str(tmp_path)]


def finds_nothing(folder: Path) -> None:
    """Load without any checkpoint: nothing changes."""
    job = Job(
        stage=1, block={**LOCAL, "dp": {"codec": "blockint", "bits": 2, "error_feedback": True}}
    )
    engine = make_engine(job)
    for step in range(3):
        train_step(engine, job, step)
    session, meetings = session_of(engine), meetings_of(engine)
    assert session is not None

    def held() -> tuple[Any, ...]:
        channels = session.channels
        return channels.residuals.norm(), channels.step, meetings.clock, flat(engine)

    norm, *rest, weights = held()
    assert norm > 0 and rest == [3, 3]
    engine.load_checkpoint(str(folder / "empty"))
    with pytest.raises(AssertionError):
        engine.load_checkpoint(str(folder), "none")
    after = held()
    assert after[:3] == (norm, *rest) and torch.equal(after[3], weights)
    engine.destroy()


def test_a_load_that_finds_no_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run_ranks(4, finds_nothing, tmp_path)


def in_mode(stage: int, trains: bool) -> tuple[Any, ...]:
    """Run seven steps of islands in one module mode; return meetings, clock, native bytes, weights.

    A forward pass without backward, as in a validation, comes between the steps.
    """
    job = Job(stage=stage, block=ADAM)
    engine = make_engine(job)
    engine.train(trains)
    for step in range(7):
        train_step(engine, job, step)
        engine(batch(dist.get_rank(), step, torch.float32)[0])
    session, meetings = session_of(engine), meetings_of(engine)
    assert session is not None
    entry = session.channels.ledger.interval["sync", "forward"]
    found = (meetings._figures.meetings, meetings.clock, session.channels.step,
             entry.raw_nbytes, entry.wire_nbytes, flat(engine))  # fmt: skip
    engine.destroy()
    return found


def in_both_modes(stages: list[int]) -> None:
    for stage in stages:
        (*trained, weights), (*evaluated, others) = (in_mode(stage, on) for on in (True, False))
        assert evaluated == trained, stage
        assert trained[:3] == [3, 7, 7] and min(trained[3:]) > 0, (stage, trained)
        assert torch.equal(others, weights), stage


def test_a_step_counts_in_eval_mode_too() -> None:
    run_ranks(2, in_both_modes, [0, 1, 3] if NIGHTLY else [1, 3])
