"""Parameter deltas on real DeepSpeed engines: replicas, resumed runs, exact checkpoints."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import CheckpointError
from tests.ranks import RunRanks

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.selection import by_day
from tests.training.trainer import Job, Tiny, digests, make_engine, train_step, write_into

DELTA4 = {"codec": "blockint", "bits": 4, "delta": True}
BLOCK = {"dp": "none", "zero": DELTA4, "min_bytes": 0}
STEPS = 6

JOBS = {
    "zero1-fp32": Job(1),
    "zero1-bf16": Job(1, "bf16"),
    "zero2-bf16": Job(2, "bf16"),
    "zero2-offload": Job(2, "bf16", zero={"offload_optimizer": {"device": "cpu"}}),
    "round_robin": Job(2, zero={"round_robin_gradients": True}),
    "bf16_optimizer": Job(1, "bf16", bf16_optimizer=True),
}


def engine_of(job: Job) -> Any:
    """Return an engine with a frozen first layer and two parameter groups."""
    torch.manual_seed(0)
    model = Tiny()
    model.inner.requires_grad_(False)
    weights = {"params": [model.middle.weight, model.outer.weight], "weight_decay": 0.1}
    rest = {"params": [*model.norm.parameters(), model.scale, model.outer.bias]}
    return make_engine(job, model, [weights, rest])


def masters(engine: Any) -> list[tuple[Tensor, Tensor]]:
    """Return ``(flat, all ranks' masters)`` by parameter group."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "bf16_groups_flat"):
        flats, own = optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition
    else:
        flats, own = optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
    found = []
    for flat, shard in zip(flats, own, strict=True):
        shards = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(shards, shard.detach().clone())
        found.append((flat.detach(), torch.cat(shards)))
    return found


def distance(engine: Any, groups: int = 2) -> tuple[float, float]:
    """Return the relative error of the weights, and of the masters rounded to their dtype."""
    error = rounding = norm = 0.0
    for flat, exact in masters(engine)[:groups]:
        error += float((flat - exact).square().sum())
        rounding += float((exact.to(flat.dtype) - exact).square().sum())
        norm += float(exact.square().sum())
    return (error / norm) ** 0.5, (rounding / norm) ** 0.5


def follow(job: Job) -> list[tuple[dict[str, str], float, float]]:
    """Return by step digests of the weights, their error and that of rounding alone."""
    engine = engine_of(job)
    found = []
    for step in range(STEPS):
        train_step(engine, job, step)
        found.append((digests(engine), *distance(engine)))
    engine.destroy()
    return found


@pytest.mark.parametrize("name", by_day(JOBS, ["zero1-fp32", "zero2-offload", "bf16_optimizer"]))
def test_replicas_are_equal_and_near_the_masters(module_ranks: RunRanks, name: str) -> None:
    first, second = module_ranks(2, follow, replace(JOBS[name], block=BLOCK))
    assert first == second
    moved = 0
    for step, (_, error, rounding) in enumerate(first):
        if step == 0:
            assert error == rounding, "the first gather is exact"
        # steps at this learning rate change a weight by a tenth and more
        assert error < rounding + 1e-2
        moved += error > rounding
    assert moved >= STEPS - 2, "deltas of 4 bits are not exact"


def test_skipped_steps_leave_all_as_it_is(module_ranks: RunRanks) -> None:
    """fp16: the first loss scales also overflow."""
    nan_step = 3
    job = Job(1, "fp16", nan_step=nan_step, ds_json={"fp16": {"enabled": True}}, block=BLOCK)
    first, second = module_ranks(2, follow, job)
    assert first == second
    assert first[nan_step] == first[nan_step - 1]
    assert all(error < rounding + 1e-2 for _, error, rounding in first)
    assert first[-1][0] != first[0][0]


def broken_run(
    job: Job, folder: str
) -> tuple[list[float], list[float], list[float], dict[str, bool]]:
    """Return the losses of an unbroken run with a checkpoint half-way, and after a restart."""
    engine = engine_of(job)
    whole = [train_step(engine, job, step) for step in range(STEPS)]
    engine = engine_of(job)
    saving = [train_step(engine, job, step) for step in range(STEPS // 2)]
    before = digests(engine)
    engine.save_checkpoint(folder, tag="half")
    facts = {"saving changes nothing": digests(engine) == before}
    facts["saved weights are exact"] = saved_exactly(engine, folder)
    saving += [train_step(engine, job, step) for step in range(STEPS // 2, STEPS)]
    again = engine_of(job)
    path, _ = again.load_checkpoint(folder, tag="half")
    assert path is not None
    facts["loading restores what ranks held"] = digests(again) == before
    resumed = [train_step(again, job, step) for step in range(STEPS // 2, STEPS)]
    facts["the end is the same"] = digests(again) == digests(engine)
    return whole, saving, resumed, facts


def saved_exactly(engine: Any, folder: str) -> bool:
    """Return whether the file holds the rounded masters instead of the weights in use."""
    path = Path(folder, "half", "mp_rank_00_model_states.pt")
    saved = torch.load(path, weights_only=False)["module"]
    now = {
        name: weight for name, weight in engine.module.named_parameters() if weight.requires_grad
    }
    assert not all(torch.equal(saved[name], weight) for name, weight in now.items())
    exact = torch.cat([found for _, found in masters(engine)])
    rounded = exact.to(next(iter(now.values())).dtype)
    # the flat group has upstream's order: only values matter
    values = torch.cat([saved[name].reshape(-1) for name in now]).sort().values
    found = rounded[rounded != 0].sort().values
    return torch.equal(values[values != 0], found)


@pytest.mark.parametrize(
    "name", by_day(["zero1-fp32", "zero1-bf16", "zero2-bf16", "bf16_optimizer"], ["zero2-bf16"])
)
def test_a_resumed_run_is_the_unbroken_one(
    module_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    for whole, saving, resumed, facts in module_ranks(
        2, broken_run, replace(JOBS[name], block=BLOCK), str(tmp_path)
    ):
        assert [fact for fact, holds in facts.items() if not holds] == []
        assert saving == whole
        assert resumed == whole[STEPS // 2 :]


def reference_file(folder: str, rank: int) -> Path:
    return Path(folder, "half", f"hybridcomp_parameters_rank_{rank:05d}.pt")


def lost(job: Job, folder: str, how: str) -> tuple[bool, dict[str, str], float, float]:
    """Load a checkpoint with unusable references; return the next step's result."""
    engine = engine_of(job)
    for step in range(3):
        train_step(engine, job, step)
    engine.save_checkpoint(folder, tag="half")
    if how == f"file {dist.get_rank()} missing":
        reference_file(folder, dist.get_rank()).unlink()
    train_step(engine, job, 3)
    settings = {"load_optimizer_states": False} if how == "weights only" else {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine.load_checkpoint(f"{folder}/empty" if how == "nothing" else folder, **settings)
    told = "holds no parameter references of 2 ranks at step 3" in out.getvalue()
    assert told == ("missing" in how and dist.get_rank() == 0)
    loaded = distance(engine)
    train_step(engine, job, 4)
    return loaded[0] == loaded[1], digests(engine), *distance(engine)


@pytest.mark.parametrize("how", ["file 0 missing", "file 1 missing", "weights only"])
def test_deltas_start_anew_after_loading_without_references(
    module_ranks: RunRanks, tmp_path: Path, how: str
) -> None:
    job = replace(JOBS["zero1-fp32"], block=BLOCK)
    first, second = module_ranks(2, lost, job, str(tmp_path), how)
    assert first == second
    exact, _, error, rounding = first
    assert exact and error == rounding == 0.0


def load_swapped(job: Job, folder: str) -> tuple[str, bool]:
    """Swap the references of two ranks; return the load's error, and if weights are unchanged."""
    engine = engine_of(job)
    for step in range(3):
        train_step(engine, job, step)
    engine.save_checkpoint(folder, tag="half")
    if dist.get_rank() == 0:
        one, other = reference_file(folder, 0), reference_file(folder, 1)
        aside = one.rename(one.with_suffix(".aside"))
        other.rename(one)
        aside.rename(other)
    dist.barrier()
    train_step(engine, job, 3)
    before = digests(engine)
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(folder)
    return str(raised.value), digests(engine) == before


def test_references_of_another_rank_are_refused(module_ranks: RunRanks, tmp_path: Path) -> None:
    job = replace(JOBS["zero1-fp32"], block=BLOCK)
    for error, unchanged in module_ranks(2, load_swapped, job, str(tmp_path)):
        assert "rank 0: " in error and "rank_00000.pt" in error and "'rank' cannot be 1" in error
        assert unchanged


def test_a_load_that_finds_nothing_keeps_the_references(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    job = replace(JOBS["zero1-fp32"], block=BLOCK)
    for exact, _, error, rounding in module_ranks(2, lost, job, str(tmp_path), "nothing"):
        assert not exact and error > rounding, "the next gather sends deltas"


def written(job: Job, how: str) -> tuple[dict[str, str], float, float]:
    """Write into the weights, or read them; return the step after it."""
    engine = engine_of(job)
    for step in range(3):
        train_step(engine, job, step)
    write_into(engine, how)
    train_step(engine, job, 3)
    return digests(engine), *distance(engine, groups=1)  # the engine that was written into


@pytest.mark.parametrize("how", by_day(["one rank", "load_state_dict", "resync"], ["one rank"]))
def test_writing_into_weights_starts_anew(module_ranks: RunRanks, how: str) -> None:
    first, second = module_ranks(2, written, replace(JOBS["zero2-bf16"], block=BLOCK), how)
    assert first == second
    assert first[1] == first[2], "exact up to rounding"


def counted(job: Job) -> tuple[float, float, float, float]:
    engine = engine_of(job)
    from hybridcomp.channels import channels_of

    for step in range(STEPS):
        train_step(engine, job, step)
    channels = channels_of(engine)
    assert channels is not None
    entry = channels.ledger.interval["zero", "forward"]
    return entry.messages, entry.native, entry.raw_nbytes, entry.wire_nbytes


def test_lossless_deltas_train_as_native(module_ranks: RunRanks) -> None:
    job = Job(1, "bf16", lr=1e-4)
    zero = {"codec": "mpc", "delta": True}
    native = module_ranks(
        2, follow, replace(job, block={"dp": "none", "zero": "none", "min_bytes": 0})
    )
    coded = replace(job, block={**BLOCK, "zero": zero})
    assert module_ranks(2, follow, coded) == native
    for messages, left, raw, wire in module_ranks(2, counted, coded):
        assert (messages, left) == (2 * STEPS, 2)
        assert wire - raw / STEPS < 0.6 * raw * (STEPS - 1) / STEPS


def test_resync_every_is_heard(module_ranks: RunRanks) -> None:
    zero = {**DELTA4, "resync_every": 2}
    for messages, left, *_ in module_ranks(
        2, counted, replace(Job(1), block={**BLOCK, "zero": zero})
    ):
        assert (messages, left) == (2 * STEPS, STEPS)
