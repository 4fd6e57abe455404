"""Restart DeepSpeed engines with residuals; scale and drop residuals with fp16's loss scale."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridcomp.errors import CheckpointError
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed

pytest.importorskip("deepspeed")

WIDTH = 48
#: rank 0's file, whose guard state is read
GUARDED = "hybridcomp_residuals_rank_00000.pt"


def make_engine(stage: int, **extra: Any) -> Any:
    """Return a patched engine: 4-bit gradients with error feedback."""
    import deepspeed

    import hybridcomp

    start_deepspeed()
    hybridcomp.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH + 5), torch.nn.ReLU(), torch.nn.Linear(WIDTH + 5, WIDTH)
    )
    block = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}
    block |= extra.pop("block", {})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000,
        "compression": block,
        **extra,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def train(engine: Any, first: int, last: int, seed: int) -> list[float]:
    """Return this rank's losses of steps ``first`` to ``last``."""
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        values = torch.randn(4, WIDTH, generator=generator).to(dtype)
        loss = (engine(values) - values).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def broken_run(folder: str, stage: int, block: dict[str, Any]) -> tuple[Any, ...]:
    """Run ten steps, and ten steps with a restart after five."""
    from hybridcomp.channels import channels_of

    rank = dist.get_rank()
    engine = make_engine(stage, block=block)
    train(engine, 0, 5, rank)
    before = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    engine.save_checkpoint(folder)
    for name, weight in engine.module.named_parameters():
        assert torch.equal(weight, before[name])
    whole = train(engine, 5, 10, rank)
    again = make_engine(stage, block=block)
    path, _ = again.load_checkpoint(folder)
    assert path is not None
    channels = channels_of(again)
    assert channels is not None and channels.step == 5
    restored = channels.residuals.norm()
    return whole, train(again, 5, 10, rank), restored


def feedback(bits: int) -> dict[str, Any]:
    return {"codec": "blockint", "bits": 4, "error_feedback": {"bits": bits}}


LOW_RANK, BOUND = {"codec": "powersgd", "rank": 2}, {"error_bound": 0.02, "error_feedback": True}
#: stage, dp, zero; stage 0 gathers no parameters
RESTARTS = [
    (1, feedback(8), "none"), (3, feedback(4), "blockint"), (2, LOW_RANK, "none"),
    (0, BOUND, "none"), (0, LOW_RANK, "none"), (0, feedback(32), "none"),
    *((stage, feedback(32), zero) for stage in (1, 2, 3) for zero in ("none", "blockint")),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "dp", "zero"), by_day(RESTARTS, RESTARTS[:4]))
def test_restart_is_bit_identical(
    module_ranks: RunRanks, tmp_path: Path, stage: int, dp: dict[str, Any], zero: str
) -> None:
    block = {"dp": dp, **({"zero": zero} if stage else {})}
    for whole, resumed, residual in module_ranks(2, broken_run, str(tmp_path), stage, block):
        assert residual > 0
        assert resumed == whole


def resumed_without(folder: str) -> list[str]:
    """Return rank 0's message when a checkpoint has residuals but the job has none."""
    engine = make_engine(1)
    train(engine, 0, 2, 0)
    engine.save_checkpoint(folder)
    told, others = [], []
    for block in ({"enabled": False}, {"codec": "bf16"}):
        settings = block if "enabled" in block else {"dp": block}
        others.append(make_engine(1, block=settings))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            path, _ = others[-1].load_checkpoint(folder)
        assert path is not None
        told.append(out.getvalue())
    dist.barrier()
    Path(folder, "global_step2", "hybridcomp_states_rank_00000.pt").touch()  # as from NVMe
    for other in others:
        with pytest.raises(CheckpointError, match="which DeepSpeed alone cannot read"):
            other.load_checkpoint(folder)
    return told


def test_a_job_that_drops_residuals_is_told(module_ranks: RunRanks, tmp_path: Path) -> None:
    (without, other), (silent, quiet) = module_ranks(2, resumed_without, str(tmp_path))
    assert "this job has no block: dropped are hybridcomp_residuals_rank_*.pt" in without
    assert "this job's block has no error feedback under dp" in other
    assert "WARNING" not in silent + quiet  # rank 1
    note = json.loads((tmp_path / "global_step2" / "hybridcomp_checkpoint.json").read_text())
    assert note["step"] == 2 and note["world_size"] == 2 and note["error_feedback"] is True


def saved_nowhere(folder: str) -> list[str]:
    """Save checkpoints without a folder; return the files of the working directory ``folder``."""
    os.chdir(folder)
    engine = make_engine(1)
    train(engine, 0, 1, 0)
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="save_dir must be a non-empty string"):
            engine.save_checkpoint(nothing)
    return os.listdir(folder)


def test_without_a_folder_nothing_is_saved(module_ranks: RunRanks, tmp_path: Path) -> None:
    """Upstream's error, as without hybridcomp."""
    assert module_ranks(1, saved_nowhere, str(tmp_path)) == [[]]


def exact_run(folder: str) -> float:
    """Return the largest difference between saved weights and fp32 masters."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = make_engine(1, block={"zero": {"codec": "blockint", "bits": 4}})
    train(engine, 0, 3, 0)
    engine.save_checkpoint(folder, tag="here")
    saved = torch.load(f"{folder}/here/mp_rank_00_model_states.pt", weights_only=False)["module"]
    differences = []
    for name, weight in engine.module.named_parameters():
        master = safe_get_full_fp32_param(weight)
        assert not torch.equal(weight, master), "training does not use the decoded weights"
        differences.append(float((saved[name] - master).abs().max()))
    full = mock.patch.object(engine, "_save_checkpoint", side_effect=OSError("full"))
    with full, pytest.raises(OSError, match="full"):
        engine.save_checkpoint(folder, tag="there")
    for weight in engine.module.parameters():
        assert torch.equal(weight, safe_get_full_fp32_param(weight)), "exact until the next step"
    train(engine, 3, 4, 0)
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    saved = torch.load(f"{folder}/weights.bin")
    for name, weight in engine.module.named_parameters():
        differences.append(float((saved[name] - safe_get_full_fp32_param(weight)).abs().max()))
    return max(differences)


def test_saved_weights_are_the_master_weights(module_ranks: RunRanks, tmp_path: Path) -> None:
    assert module_ranks(2, exact_run, str(tmp_path)) == [0.0, 0.0]


def saved_before_the_first(folder: str) -> bool:
    """Save after the last native step; return whether the weights stayed native."""
    engine = make_engine(1, block={"zero": {"codec": "blockint", "bits": 4}, "start_step": 2})
    train(engine, 0, 2, 0)
    before = [weight.detach().clone() for weight in engine.module.parameters()]
    engine.save_checkpoint(folder)
    return all(map(torch.equal, before, engine.module.parameters()))


def test_saving_right_before_start_step_encodes_nothing(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    assert module_ranks(2, saved_before_the_first, str(tmp_path)) == [True, True]


def weights_only(folder: str) -> tuple[float, int]:
    """Load weights without optimizer states; return what is left of residuals, and the step."""
    from hybridcomp.channels import channels_of

    engine = make_engine(1)
    train(engine, 0, 2, dist.get_rank())
    engine.save_checkpoint(folder)
    train(engine, 2, 3, dist.get_rank())
    engine.load_checkpoint(folder, load_optimizer_states=False)
    channels = channels_of(engine)
    assert channels is not None
    return channels.residuals.norm(), channels.step


def test_weights_that_are_loaded_alone_take_no_residuals(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    assert module_ranks(2, weights_only, str(tmp_path)) == [(0.0, 2)] * 2


def save_run(folder: str) -> tuple[dict[str, torch.Tensor], float]:
    from hybridcomp.channels import channels_of

    engine = make_engine(0)
    train(engine, 0, 3, dist.get_rank())
    engine.save_checkpoint(folder)
    channels = channels_of(engine)
    assert channels is not None
    return sums(channels.residuals.state_dict()), channels.residuals.norm()


def load_run(folder: str) -> dict[str, torch.Tensor]:
    from hybridcomp.channels import channels_of

    engine = make_engine(0)
    engine.load_checkpoint(folder)
    channels = channels_of(engine)
    assert channels is not None
    return sums(channels.residuals.state_dict())


def sums(state: Any) -> dict[str, torch.Tensor]:
    """Return the residual by parameter, both hops together."""
    total: dict[str, torch.Tensor] = {}
    for by_name in state.values():
        for name, parts in by_name.items():
            end = max(offset + tensor.numel() for offset, tensor in parts)
            found = total.setdefault(name, torch.zeros(end))
            if found.numel() < end:
                found = total[name] = torch.cat([found, torch.zeros(end - found.numel())])
            for offset, tensor in parts:
                found[offset : offset + tensor.numel()] += tensor
    return total


@pytest.mark.parametrize("ranks", by_day([1, 3], [3]))
def test_sum_of_residuals_survives_another_number_of_ranks(
    module_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    saved = module_ranks(2, save_run, str(tmp_path))
    assert all(norm > 0 for _, norm in saved)
    names = saved[0][0].keys() | saved[1][0].keys()
    before = {name: add(saved[0][0].get(name), saved[1][0].get(name)) for name in names}
    # each value goes to one rank, which sends it in its first reduction
    after: dict[str, torch.Tensor] = {}
    for of_rank in module_ranks(ranks, load_run, str(tmp_path)):
        for name, total in of_rank.items():
            after[name] = add(after[name], total) if name in after else total
    assert after.keys() == before.keys()
    for name, total in before.items():
        torch.testing.assert_close(after[name], total)


def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor:
    assert left is not None and right is not None
    size = max(left.numel(), right.numel())
    pad = torch.nn.functional.pad
    return pad(left, (0, size - left.numel())) + pad(right, (0, size - right.numel()))


def damage(path: Path) -> None:
    """Change the form of rank 0's guard; else flip a residual's bit, or truncate JSON."""
    if path.name == GUARDED:
        torch.save(torch.load(path) | {"guard": {"dp": {"of_later": 1}}}, path)
        return
    raw = bytearray(path.read_bytes())
    if path.suffix == ".json":
        raw = raw[: len(raw) // 2]
    else:
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda one: one.file_size)
        raw[largest.header_offset + 200] ^= 1  # past its name and alignment
    path.write_bytes(bytes(raw))


def refused_loads(folder: str) -> list[tuple[str, list[bool]]]:
    """Load each damaged copy of a checkpoint; return errors, and unchanged weights.

    The last copy is undamaged: it must load, and change weights.
    """
    engine = make_engine(1)
    train(engine, 0, 2, dist.get_rank())
    engine.save_checkpoint(folder, tag="whole")
    train(engine, 2, 3, dist.get_rank())
    before = [weight.detach().clone() for weight in engine.module.parameters()]
    found = []
    for name in ("hybridcomp_residuals_rank_00001.pt", "hybridcomp_state.json", GUARDED, None):
        if dist.get_rank() == 0:
            copy = Path(shutil.copytree(Path(folder, "whole"), Path(folder, f"damaged {name}")))
            if name is not None:
                damage(copy / name)
        dist.barrier()
        said = ""
        try:
            engine.load_checkpoint(folder, tag=f"damaged {name}")
        except CheckpointError as error:
            said = str(error)
        after = engine.module.parameters()
        found.append((said, [torch.equal(*pair) for pair in zip(before, after, strict=True)]))
    return found


def test_damage_is_told_on_all_ranks_before_a_weight_changes(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    for residuals, state, guard, whole in module_ranks(2, refused_loads, str(tmp_path)):
        assert "rank 1: " in residuals[0] and "hybridcomp_residuals_rank_00001.pt" in residuals[0]
        assert "checksum" in residuals[0], residuals[0]
        assert "rank 0: " in state[0] and "hybridcomp_state.json" in state[0]
        assert GUARDED in guard[0] and "'guard'" in guard[0] and "of_later" in guard[0]
        assert all(residuals[1]) and all(state[1]) and all(guard[1])
        assert whole[0] == "" and not any(whole[1]), "a sound one loads"


def write_fails(folder: str, delta: bool) -> tuple[int, str, list[float]]:
    """Save again where DeepSpeed cannot write, train, and load what the first save wrote.

    Return the number of gathers, the output and the trained weights.
    """
    from hybridcomp.patches.ds.checkpoint import exact_weights

    engine = make_engine(1, block={"zero": {"codec": "blockint", "bits": 4, "delta": delta}})
    train(engine, 0, 2, dist.get_rank())
    engine.save_checkpoint(folder, tag="last")
    train(engine, 2, 3, dist.get_rank())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(engine.checkpoint_engine, "save", side_effect=full),
        mock.patch.object(exact_weights, "_restore") as gathers,
        pytest.raises(OSError, match=full.strerror),
    ):
        engine.save_checkpoint(folder, tag="last")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(engine, 3, 5, dist.get_rank())
        weights = torch.cat([weight.detach().view(-1) for weight in engine.module.parameters()])
        engine.load_checkpoint(folder, tag="last")
    return gathers.call_count, out.getvalue(), weights.tolist()


@pytest.mark.parametrize("delta", by_day([True, False], [True]))
def test_a_rank_that_cannot_write_gathers_nothing(
    module_ranks: RunRanks, tmp_path: Path, delta: bool
) -> None:
    """The other ranks wait for it in DeepSpeed's barrier."""
    first, second = module_ranks(2, write_fails, str(tmp_path), delta)
    assert first[0] == second[0] == 0
    assert "somebody wrote" not in first[1], "the next gather is exact"
    assert "of step 3, and the checkpoint beside it of step 2, as a later save did" in first[1]
    assert first[2] == second[2]


def save_under_zero(folder: str) -> None:
    for name, block in (("native", {"enabled": False}), ("ours", {})):
        engine = make_engine(1, block=block)
        train(engine, 0, 2, 0)
        engine.save_checkpoint(f"{folder}/{name}")


def load_under_zero(folder: str) -> tuple[list[str], int, float]:
    """Return load errors natively and with hybridcomp; step and residuals after the second."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    from hybridcomp.channels import channels_of

    said = []
    for name, block in (("native", {"enabled": False}), ("ours", {})):
        engine = make_engine(1, block=block)
        with pytest.raises(ZeRORuntimeException) as raised:
            engine.load_checkpoint(f"{folder}/{name}")
        said.append(str(raised.value))
    channels = channels_of(engine)
    assert channels is not None
    return said, channels.step, channels.residuals.norm()


def test_other_ranks_under_zero_are_refused_as_upstream_refuses_them(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    """DeepSpeed does not reshard its optimizer's state; hybridcomp then loads nothing."""
    module_ranks(2, save_under_zero, str(tmp_path))
    for (native, ours), step, residual in module_ranks(3, load_under_zero, str(tmp_path)):
        assert native == ours
        assert "used a DP world size of 2 but the current world size is 3" in ours
        assert step == 0 and residual == 0


def overflow_run() -> list[tuple[bool, float, float]]:
    """Return (overflow, change of loss scale, residual norm) by step; the first steps overflow."""
    from hybridcomp.channels import channels_of
    from hybridcomp.patches.ds.job_facts import loss_scale

    fp16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 4, "hysteresis": 1}
    engine = make_engine(1, fp16=fp16)
    channels = channels_of(engine)
    assert channels is not None
    found = []
    for step in range(20):
        before = loss_scale(engine)
        train(engine, step, step + 1, dist.get_rank())
        overflow, norm = bool(engine.optimizer.overflow), channels.residuals.norm()
        found.append((overflow, loss_scale(engine) / before, norm))
    return found


def test_residuals_follow_the_loss_scale_and_drop_on_overflow(module_ranks: RunRanks) -> None:
    for history in module_ranks(2, overflow_run):
        assert any(overflow for overflow, *_ in history)
        assert any(not overflow and factor == 2.0 for overflow, factor, _ in history)
        for overflow, factor, norm in history:
            if overflow:
                assert factor == 0.5 and norm == 0.0
        norms = [norm for overflow, factor, norm in history if not overflow and factor == 1.0]
        doubled = [norm for overflow, factor, norm in history if factor == 2.0]
        assert norms and max(doubled) > 0


def autocast_run() -> list[tuple[float, float]]:
    """Return each step's change of loss scale and residual norm: the fourth overflows."""
    from hybridcomp.channels import channels_of
    from hybridcomp.patches.ds.job_facts import loss_scale

    engine = make_engine(0, torch_autocast={"enabled": True, "dtype": "float16"})
    channels, found = channels_of(engine), []
    assert channels is not None
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
        values, before = torch.randn(4, WIDTH, generator=generator), loss_scale(engine)
        loss = (engine(values) - values).float().square().mean()
        engine.backward(loss * (1e38 if step == 3 else 1.0))
        engine.step()
        found.append((loss_scale(engine) / before, channels.residuals.norm()))
    return found


def test_residuals_drop_where_the_scaler_of_autocast_skips_a_step(module_ranks: RunRanks) -> None:
    """At stage 0 torch's scaler skips the step, without DeepSpeed's optimizer knowing."""
    for history in module_ranks(2, autocast_run):
        assert [factor for factor, _ in history] == [1.0, 1.0, 1.0, 0.5, 1.0]
        assert [norm > 0 for _, norm in history] == [True, True, True, False, True]
        # both of a single step; the scale of the first is known before it
        assert 0.5 < history[0][1] / history[4][1] < 8
