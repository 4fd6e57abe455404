"""The single block of a megatron-core process: its source, and the follower of steps."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.channels import NAME, Channels
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.quantized_residual import as_fp32
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.mcore import attach
from hybridcomp.patches.mcore.ddp_batch import BucketBatch, CollectedCall
from hybridcomp.session import process
from tests.ranks import RunRanks, run_ranks

EVERY = 3
BLOCK = {"tp": {"codec": "blockint", "bits": 8}}
FEEDBACK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}}


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    process.configure(None)


@pytest.mark.parametrize("form", ["block", "dict", "model", "file of a block", "file"])
def test_forms_of_a_block(form: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BLOCK if "of" in form else {"compression": BLOCK}))
    forms: dict[str, Any] = {
        "block": BLOCK, "dict": {"compression": BLOCK}, "model": CompressionConfig.parse(BLOCK),
    }  # fmt: skip
    process.configure(forms.get(form, path))
    assert process._holder.config is not None
    assert process._holder.config.flat() == CompressionConfig.parse(BLOCK).flat()
    assert process.current() is None  # torch.distributed is not initialized


def settle(path: str | None) -> tuple[Any, Any]:
    """Return this rank's block, and whether a second request has the same channels."""
    with mock.patch.dict("os.environ", {} if path is None else {process.ENVIRONMENT: path}):
        process.configure(None)
        channels = process.current()
    same = channels is process.current()
    return None if channels is None else channels.config.flat(), same


def test_environment_and_no_block(module_ranks: RunRanks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BLOCK))
    assert module_ranks(2, settle, None) == [(None, True)] * 2
    found = module_ranks(2, settle, str(path))
    assert found == [(CompressionConfig.parse(BLOCK).flat(), True)] * 2


class Optimizer:
    """A step within a step, as in ChainedOptimizer."""

    def __init__(self) -> None:
        self.scale = 8.0
        self.success = True
        self.after = 8.0

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor([self.scale])

    def inner(self) -> tuple[bool, None, None]:
        return self.success, None, None

    def outer(self) -> tuple[bool, None, None]:
        found = self.inner()
        self.scale = self.after
        return found


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> Optimizer:
    """Return an optimizer with the patch, in a process without ranks."""
    device = "hybridcomp.session.engine_session.default_device"
    monkeypatch.setattr(device, lambda: torch.device("cpu"))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, **how: None)  # the guard's
    for name in ("inner", "outer"):
        monkeypatch.setattr(Optimizer, name, attach.make_step(getattr(Optimizer, name)))
    return Optimizer()


def test_steps_count_once_and_residuals_follow(optimizer: Optimizer) -> None:
    channels = Channels(CompressionConfig.parse(FEEDBACK))
    process.use(channels)
    session, follower = process.own_session(), mock.Mock()
    assert session is not None
    session.follow(follower)
    residual = as_fp32(channels.residuals.get("sender", [Piece("a", 0, 4)], torch.zeros(4)))
    residual.fill_(1.0)
    optimizer.outer()
    assert channels.step == 1 and residual.tolist() == [1.0] * 4
    optimizer.after = 4.0
    optimizer.outer()
    assert channels.step == 2 and residual.tolist() == [0.5] * 4
    optimizer.success = False
    optimizer.outer()
    assert channels.step == 3 and residual.tolist() == [0.0] * 4
    # Megatron's skipped steps are steps
    assert follower.before_step.call_count == follower.after_step.call_count == 3
    assert not follower.after_skip.called


def test_a_scale_that_no_scaler_changes_is_not_read() -> None:
    """The host would have to wait for it before launching the step."""

    def unread() -> torch.Tensor:
        raise AssertionError("the loss scale lies on the GPU")

    plain = SimpleNamespace(grad_scaler=None, get_loss_scale=unread)
    chained = SimpleNamespace(chained_optimizers=[plain, plain], get_loss_scale=unread)
    assert attach.loss_scale(plain) == attach.loss_scale(chained) == 1.0
    scaled = SimpleNamespace(grad_scaler=object(), get_loss_scale=lambda: torch.tensor([8.0]))
    mixed = SimpleNamespace(
        chained_optimizers=[plain, scaled], get_loss_scale=scaled.get_loss_scale
    )
    assert attach.loss_scale(scaled) == attach.loss_scale(mixed) == 8.0
    assert attach.loss_scale(Optimizer()) == 8.0, "one that says nothing of a scaler is asked"


class Config(dict[str, Any]):
    """W&B's config."""

    def update(self, found: dict[str, Any], allow_val_change: bool) -> None:  # type: ignore[override]
        super().update(found)


def report(jsonl: str) -> tuple[list[dict[str, float]], dict[str, Any], int]:
    """Write a report with a W&B run on the last rank; return its log, config and steps."""
    import torch.distributed as dist

    logged: list[dict[str, float]] = []
    run = SimpleNamespace(
        config=Config(),
        step=0,
        define_metric=lambda name, **how: None,
        log=lambda values, commit: logged.append(values),
    )
    fake: Any = SimpleNamespace(run=run if dist.get_rank() == 1 else None)
    with mock.patch.dict(sys.modules, {"wandb": fake}):
        process.configure({**BLOCK, "ledger": {"jsonl": jsonl, "every": EVERY}})
        channels = process.current()
        assert channels is not None
        channels["tp"].count_native(100, "backward")
        optimizer, step = Optimizer(), attach.make_step(Optimizer.outer)
        for _ in range(EVERY):
            step(optimizer)
    return logged, run.config if dist.get_rank() == 1 else {}, channels.step


def test_reports_go_to_the_file_and_to_the_rank_with_the_run(tmp_path: Path) -> None:
    jsonl = tmp_path / "ledger.jsonl"
    (first, _, steps), (last, config, _) = run_ranks(2, report, str(jsonl))
    assert steps == EVERY
    assert first == []
    assert config["compression"]["ledger"]["every"] == EVERY and config["codecs"]
    assert last[0]["train/compression/tp/backward/raw_MB"] == pytest.approx(2e-4)
    record = json.loads(jsonl.read_text().splitlines()[0])
    assert record["step"] == EVERY
    assert record["dimensions"]["tp"]["backward"]["messages"] == 2


def forget(restored: bool, folder: str | None, block: dict[str, Any]) -> str:
    """Return the messages of two steps after a restart; ``folder``: has hybridcomp's state."""
    process.configure({"min_bytes": 0, **block})
    optimizer, step = Optimizer(), attach.make_step(Optimizer.outer)
    load = attach.make_load_state_dict(lambda self, state_dict: None)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if restored:
            load(optimizer, {})
        if folder is not None:
            hybridcomp.save_state(folder)
            hybridcomp.load_state(folder)
        step(optimizer)
        step(optimizer)
    return said.getvalue()


@pytest.mark.parametrize(
    ("restored", "loaded", "block", "times"),
    [
        (True, False, FEEDBACK, 1),
        (True, True, FEEDBACK, 0),
        (False, False, FEEDBACK, 0),
        (True, False, BLOCK, 0),
        (True, False, {**BLOCK, "start_step": 3}, 1),
    ],
)
def test_a_restart_without_our_state_is_said_once(
    module_ranks: RunRanks, restored: bool, loaded: bool, block: dict[str, Any], times: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    (said,) = module_ranks(1, forget, restored, str(tmp_path) if loaded else None, block)
    assert said.count("WARNING: Megatron's optimizer was restored") == times


def carry(folder: str, scale: float | None) -> tuple[int, float, bool]:
    """Save with loss scale 8 and load at ``scale``; return step, residuals and whether loading said
    that files are missing: references of deltas are not saved.
    """
    block = {"min_bytes": 0, **FEEDBACK, "zero": {"codec": "blockint", "delta": True}}

    def residual() -> torch.Tensor:
        channels = process.current()
        assert channels is not None
        return as_fp32(channels.residuals.get("sender", [Piece("a", 0, 4)], torch.zeros(4)))

    process.configure(block)
    residual().fill_(1.0)
    attach.make_step(Optimizer.outer)(Optimizer())
    hybridcomp.save_state(folder)
    process.configure(block)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        hybridcomp.load_state(folder, scale)
    channels = process.current()
    assert channels is not None
    return channels.step, float(residual().sum()), "lacks files" in said.getvalue()


def test_residuals_follow_a_loss_scale_that_changed_in_between(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    assert module_ranks(1, carry, str(tmp_path), None) == [(1, 4.0, False)]
    assert module_ranks(1, carry, str(tmp_path), 2.0) == [(1, 1.0, False)]


def missing(folder: str) -> tuple[int, str]:
    process.configure({"min_bytes": 0, **FEEDBACK})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        hybridcomp.load_state(folder)
    channels = process.current()
    assert channels is not None
    return channels.step, said.getvalue()


def test_a_folder_without_state_is_said(module_ranks: RunRanks, tmp_path: Path) -> None:
    ((step, said),) = module_ranks(1, missing, str(tmp_path))
    assert step == 0 and "lacks files of hybridcomp" in said and "steps count from zero" in said


def test_state_needs_a_block() -> None:
    for call in (hybridcomp.save_state, hybridcomp.load_state):
        with pytest.raises(ConfigError, match="no block"):
            call("anywhere")


def average(kind: Any) -> tuple[float, float]:
    """Average a bucket as with ``average_in_collective``; return the largest value of the mean, and
    of what of it is neither in the sum nor in the residuals.
    """
    channels = Channels(CompressionConfig.parse({**FEEDBACK, "min_bytes": 0}))
    process.use(channels)
    rank, size, numel = dist.get_rank(), dist.get_world_size(), 128
    buffer = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    mean = buffer / size
    dist.all_reduce(mean)
    weight: Any = torch.nn.Parameter(torch.zeros(numel))
    weight.main_grad = buffer
    setattr(weight, NAME, "weight")
    group = SimpleNamespace(buckets=[SimpleNamespace(grad_data=buffer, params_list=[weight])])
    own = slice(rank * numel // size, (rank + 1) * numel // size)
    out = buffer if kind == "all_reduce" else buffer[own]
    world: Any = dist.group.WORLD
    batch = BucketBatch(world, False, group)
    batch.calls.append(CollectedCall(kind, lambda: None, out, buffer, dist.ReduceOp.AVG))
    batch.launch(contextlib.nullcontext, None)
    batch.wait()
    left = torch.zeros(numel)
    for (_, pieces), held in channels.residuals._stretches.items():
        flat, start = as_fp32(held.flat), 0
        for piece in pieces:
            if piece.name:
                left[piece.offset :][: piece.numel] += flat[start:][: piece.numel]
            start += piece.numel
    dist.all_reduce(left)
    lacks = mean - left - buffer if kind == "all_reduce" else (mean - left)[own] - out
    return float(mean.abs().max()), float(lacks.abs().max())


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_residuals_of_averages_are_averages(module_ranks: RunRanks, kind: str) -> None:
    """They stay valid on other numbers of ranks, and where instances are averaged in turn."""
    for largest, lacks in module_ranks(2, average, kind):
        assert lacks < 1e-5 * largest
