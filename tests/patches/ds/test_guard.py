"""The guard acts on all ranks at once: equal replicas, nothing lost, also after restarts."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels, channels_of
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.config import CompressionConfig
from hybridcomp.session.reporter import line
from tests.channels import sent
from tests.ranks import RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training import in_turn, pipe_trainer
from tests.training.trainer import Job, digests, make_engine, train_step

#: relative error 1.6 on noise: worse than sending zeros, above the default limit
WRONG = {"codec": "zfp", "rate": 3}
#: its residuals are about a tenth of the gradients: above a low limit
LEAVES = {"codec": "blockint", "bits": 4, "error_feedback": True, "guard": {"residual": 0.02}}
EVERY = {"min_bytes": 0, "start_step": 2, "ledger": {"sample_every": 2}}


def watched(job: Job) -> dict[str, Any]:
    """Train; return the guard's actions and each step's codecs."""
    engine = make_engine(job)
    channels = channels_of(engine)
    assert channels is not None
    losses, native, held = [], [], []
    for step in range(job.steps):
        channels.ledger.restart()
        losses.append(train_step(engine, job, step))
        entries = channels.ledger.interval.items()
        native.append({d: (e.messages, e.native) for (d, _), e in entries if e.messages})
        held.append(channels.residuals.norm())
    rows = channels.ledger.rows(channels.ledger.interval)
    found = {
        "losses": losses,
        "native": native,
        "held": held,
        "trips": channels.guard.state(),
        "digests": digests(engine),
        "row": rows,
        "line": line(job.steps, rows),
        "memory": channels.residuals.nbytes,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day([0, 1, 2, 3], [0, 3]))
def test_an_error_over_the_limit_ends_the_compression(module_ranks: RunRanks, stage: int) -> None:
    """With default limits: sampled in step 2, native from step 3 on."""
    job = Job(stage, steps=9, block={"dp": WRONG, **EVERY})
    found = module_ranks(2, watched, job)
    for rank in found:
        (name,) = rank["trips"]
        trip = rank["trips"][name]
        assert (name, trip["step"], trip["figure"], trip["limit"]) == ("dp", 3, "error", 1.0)
        assert trip["found"] > 1.0
        for step, counts in enumerate(rank["native"]):
            messages, native = counts["dp"]
            assert messages > 0 and (native == 0) == (step == 2), (step, counts)
        assert rank["digests"] == found[0]["digests"]
        assert rank["trips"] == found[0]["trips"]
        assert rank["row"]["dp"]["forward"]["native_since"] == 3
        assert "dp zfp(rate=3), native since step 3 1.00x" in rank["line"]
    mean = sum(sum(rank["losses"][-3:]) for rank in found)
    assert mean < sum(sum(rank["losses"][:3]) for rank in found), "training goes on"


@pytest.mark.parametrize("stage", by_day([0, 1, 2, 3], [1, 3]))
def test_residuals_over_the_limit_are_sent_once(module_ranks: RunRanks, stage: int) -> None:
    """Step 2 leaves a residual, step 4 samples it, step 5 sends it."""
    job = Job(stage, steps=9, block={"dp": LEAVES, **EVERY})
    found = module_ranks(2, watched, job)
    for rank in found:
        assert rank["trips"]["dp"]["figure"] == "residual" and rank["trips"]["dp"]["step"] == 5
        assert rank["digests"] == found[0]["digests"]
        encoded = [step for step, c in enumerate(rank["native"]) if c["dp"][1] < c["dp"][0]]
        assert encoded == [2, 3, 4, 5], "step 5 is encoded losslessly"
        assert rank["held"][4] > 0 and not any(rank["held"][6:])
        assert rank["memory"] == 0, "the memory of the residuals is freed"


def test_zero_gathers_fall_back(module_ranks: RunRanks) -> None:
    job = Job(1, steps=8, block={"zero": WRONG, **EVERY})
    found = module_ranks(2, watched, job)
    for rank in found:
        assert list(rank["trips"]) == ["zero"] and rank["digests"] == found[0]["digests"]
        gathers = [counts["zero"] for counts in rank["native"]]
        since = rank["trips"]["zero"]["step"]
        assert all(native == messages for messages, native in gathers[since:])
        assert any(native == 0 for _, native in gathers[:since])


def exact(hierarchy: int) -> tuple[float, float, list[str]]:
    """Return the largest |given - delivered| after the flush, the residuals before, the log."""
    block = {"dp": LEAVES, "min_bytes": 0, "ledger": {"sample_every": 1}, "hierarchy": hierarchy}
    channels = Channels(CompressionConfig.parse(block))
    channels.place([tuple(range(dist.get_world_size()))])
    channel, cpu, told, held = channels["dp"], torch.device("cpu"), [], 0.0
    given, delivered = torch.zeros(1000), torch.zeros(1000)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tensor = torch.randn(1000, generator=generator)
        total = tensor.clone()
        dist.all_reduce(total)
        given += total
        codec = channel.codec(1000, torch.float32, None)
        if codec is None:
            dist.all_reduce(tensor)
        else:
            sent.all_reduce(channel, tensor, codec, None, pieces=[Piece("p", 0, 1000)])
        delivered += tensor
        held = max(held, channels.residuals.norm())
        sampled = channels.sampling
        channels.step += 1
        told += channels.close_step(sampled, cpu)
    return float((given - delivered).abs().max()), held, told


@pytest.mark.parametrize("hierarchy", [1, 2])
def test_nothing_is_lost_in_a_fallback(module_ranks: RunRanks, hierarchy: int) -> None:
    """``original == sent + residual`` holds to the end: residuals arrive on every rank."""
    for missing, held, told in module_ranks(2, exact, hierarchy):
        assert missing < 1e-4 < held
        assert len(told) == 1, "said once"
        assert "dp: residual norm over gradient norm" in told[0]
        assert "compression.dp.guard.residual: 0.02" in told[0] and "native from step 2" in told[0]


def resumed(folder: str, block: dict[str, Any], steps: int) -> tuple[Any, ...]:
    """Run ``steps`` steps, save, six more; then six more after a restart."""
    job = Job(1, steps=steps, block=block)
    engine = make_engine(job)
    for step in range(steps):
        train_step(engine, job, step)
    engine.save_checkpoint(folder, tag="x")
    whole = [train_step(engine, job, step) for step in range(steps, steps + 6)]
    again = make_engine(job)
    again.load_checkpoint(folder, tag="x")
    channels = channels_of(again)
    assert channels is not None
    trips = channels.guard.state()
    losses = [train_step(again, job, step) for step in range(steps, steps + 6)]
    rows = channels.ledger.rows(channels.ledger.interval)
    return whole, losses, trips, rows["dp"]["forward"]


@pytest.mark.parametrize("steps", [5, 7])
def test_a_resumed_run_stays_native(module_ranks: RunRanks, tmp_path: Path, steps: int) -> None:
    """Saved right before the step that sends the residuals, and after it."""
    block = {"dp": LEAVES, **EVERY}
    for whole, losses, trips, row in module_ranks(2, resumed, str(tmp_path), block, steps):
        assert whole == losses
        assert trips["dp"]["step"] == 5 and row["native_since"] == 5
        assert (row["native_messages"] == row["messages"]) == (steps == 7)


def rolled_back(folder: str, block: dict[str, Any]) -> tuple[int, bool, list[float]]:
    """Load a checkpoint from before the fallback in the same run; return what its steps do."""
    job = Job(1, block=block)
    engine = make_engine(job)
    norms = []
    channels = channels_of(engine)
    assert channels is not None
    for step in range(7):
        if step == 3:
            engine.save_checkpoint(folder, tag="early")
        train_step(engine, job, step)
    engine.load_checkpoint(folder, tag="early")
    begins = channels.step
    native = channels.guard.native("dp", begins)
    norms.append(channels.residuals.norm())
    train_step(engine, job, 3)
    norms.append(channels.residuals.norm())
    return begins, native, norms


def test_a_run_that_goes_back_stays_native(module_ranks: RunRanks, tmp_path: Path) -> None:
    """The first step behind the load sends the residuals that the checkpoint holds."""
    block = {"dp": LEAVES, **EVERY}
    for begins, native, (loaded, left) in module_ranks(2, rolled_back, str(tmp_path), block):
        assert begins == 3 and native
        assert loaded > 0 and left == 0


def test_no_limits_no_guard(module_ranks: RunRanks) -> None:
    """With limits "none", and without samples, a bad codec stays."""
    job = Job(0, steps=4)
    for block in (
        {"dp": {**WRONG, "guard": "none"}, **EVERY},
        {"dp": WRONG, **EVERY, "ledger": {"sample_every": 0}},
    ):
        for rank in module_ranks(2, watched, replace(job, block=block)):
            assert rank["trips"] == {} and rank["native"][3]["dp"][1] == 0


def pipeline(block: dict[str, Any]) -> tuple[Any, ...]:
    import deepspeed

    import hybridcomp

    in_turn.start_deepspeed()
    hybridcomp.install()
    torch.manual_seed(0)
    job = pipe_trainer.Job(stages=2, block=block)
    engine, *_ = deepspeed.initialize(
        model=pipe_trainer.build(job, []), config=pipe_trainer.ds_config(job, 1)
    )
    channels = channels_of(engine)
    assert channels is not None
    data = pipe_trainer.batches(job, 0)
    losses, counts = [], []
    for _ in range(6):
        channels.ledger.restart()
        losses.append(float(engine.train_batch(data)))
        ways = [channels.ledger.interval["pp", way] for way in ("forward", "backward")]
        counts.append([(way.messages, way.native) for way in ways])
    trips = channels.guard.state()
    engine.destroy()
    hybridcomp.uninstall()
    return losses, counts, trips


def test_a_pipeline_falls_back_on_both_sides(module_ranks: RunRanks) -> None:
    """Only gradients exceed the limit; activations fall back too, on sender and receiver."""
    block = {"pp": {"codec": "blockint", "bits": 8, "backward": WRONG}, **EVERY}
    first, last = module_ranks(2, pipeline, block)
    assert first[2] == last[2] and first[2]["pp"]["step"] == 3
    assert first[0][-1] < first[0][0] and first[0] == last[0]
    for _, counts, _ in (first, last):
        for step, ways in enumerate(counts):
            for messages, native in ways:
                assert not messages or (native < messages) == (step == 2), (step, ways)
