"""Planned memory against DeepSpeed: its gathers equal the computed ones, and the plan fits."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import RunRanks

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.autotune.zero3_moves import Knobs, fewest, simulate
from hybridcomp.errors import ConfigError
from tests.selection import by_day
from tests.training import nvme_trainer
from tests.training.in_turn import start_deepspeed
from tests.training.nvme_trainer import NvmeJob

WIDTH = 48
#: settings as shares of the model: prefetch, live, reuse
SHARES = (
    (0, 1, 0), (0.1, 1, 0), (0.1, 10, 10), (0.1, 0.25, 0.5), (0.05, 0.125, 1), (0.05, 0.33, 0.33),
    (0, 0.5, 0.75),
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = values + self.down(torch.relu(self.up(self.norm(values))))
        return result


class Model(nn.Module):
    """Blocks between embedding and head, and a parameter used outside its module."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(300, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head, self.recomputes = nn.Linear(WIDTH, 300, bias=False), recomputes

    def forward(self, ids: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        values = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=True) if self.recomputes else block(
                values)  # fmt: skip
        result: Tensor = self.head(values)
        return result


def make_engine(kind: str, threshold: int, policy: dict[str, Any], accumulation: int = 1) -> Any:
    """Return an engine of ``kind``: plain, recomputing, or with blocks as ZeRO leaf modules."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    import hybridcomp

    start_deepspeed()
    hybridcomp.install()
    torch.manual_seed(0)
    model = Model(recomputes=kind == "recomputing")
    if kind == "leaves":
        set_z3_leaf_modules(model, [Block])
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True}, "steps_per_print": 10_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": threshold,
            "offload_optimizer": {"device": "cpu"},
        },
        "compression": {"memory": policy},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def step(engine: Any) -> None:
    ids = torch.arange(32).view(2, 16)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(ids).float().square().mean())
        engine.step()


def coordinator_of(engine: Any) -> Any:
    return engine.optimizer.parameter_offload.get_param_coordinator()


def compared(kind: str, threshold: int, half: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return elements gathered per pass and at once, measured and computed, for each setting."""
    from hybridcomp.patches.ds.offload import planned_memory as planned

    engine = make_engine(kind, threshold, {"policy": "planned", "device_gb": 1.0})
    step(engine)
    step(engine)
    coordinator = coordinator_of(engine)
    plan = getattr(coordinator, planned.ATTRIBUTE)
    assert plan.choice is not None and planned.knobs_of(coordinator) == plan.choice.knobs
    numel: int = plan.trace.moved
    found: list[Any] = []
    for shares in SHARES[half::2]:
        knobs = Knobs(*(int(share * numel) for share in shares))
        planned.apply(coordinator, knobs)
        step(engine)
        found.append(((plan.gathered, plan.peak), tuple(simulate(plan.trace, knobs))))
    engine.destroy()
    return found


@pytest.mark.parametrize("half", by_day([0, 1], [1]))
@pytest.mark.parametrize("threshold", by_day([0, 100], [100]))
@pytest.mark.parametrize("kind", by_day(["plain", "recomputing", "leaves"], ["recomputing"]))
def test_deepspeed_gathers_what_is_computed(
    module_ranks: RunRanks, kind: str, threshold: int, half: int
) -> None:
    for every in module_ranks(2, compared, kind, threshold, half):
        for shares, (measured, computed) in zip(SHARES[half::2], every, strict=True):
            assert measured == computed, shares


def planned_steps(share: float) -> tuple[Any, ...]:
    """Plan for a device smaller than the model; return the plan, its steps, later ones."""
    from hybridcomp.patches.ds.offload import planned_memory as planned

    numel = sum(p.numel() for p in Model().parameters())
    policy = {"policy": "planned", "device_gb": 2 * share * numel / 1e9}
    engine, room = make_engine("plain", 0, policy, accumulation=2), planned.PlannedMemory._room

    def of_this_rank(plan: Any, resident: int) -> float:
        return room(plan, resident) * (1 + dist.get_rank())  # the least is for all

    with mock.patch.object(planned.PlannedMemory, "_room", of_this_rank):
        step(engine)
    coordinator = coordinator_of(engine)
    plan = getattr(coordinator, planned.ATTRIBUTE)
    choice = plan.choice  # from the second pass on
    step(engine)
    moves = plan.gathered, plan.peak
    has_differed = plan.has_differed
    bound = fewest(plan.trace, int(share * numel))
    blocks = engine.module.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]
    step(engine)
    written = planned.knobs_of(coordinator) == plan.written or plan.choice is not None
    step(engine)
    again = plan.choice is not None and planned.knobs_of(coordinator) == plan.choice.knobs
    engine.destroy()
    return choice, moves, has_differed, bound, written, again


@pytest.mark.parametrize("share", by_day([0.35, 0.6], [0.35]))
def test_the_plan_fits_and_is_near_the_fewest(module_ranks: RunRanks, share: float) -> None:
    limit = int(share * sum(p.numel() for p in Model().parameters()))
    for choice, moves, differed, bound, written, again in module_ranks(2, planned_steps, share):
        assert choice.moves.peak <= limit and moves[1] <= limit and not differed
        assert bound <= choice.moves.gathered <= 1.05 * bound
        assert written and again, "a pass in another order is recorded anew"


def test_of_several_dtypes_the_widest_is_planned_for() -> None:
    """A quantized base may begin with weights in integers, before 16-bit ones."""
    from hybridcomp.patches.ds.offload import planned_memory as planned

    module = nn.ParameterList(
        nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        for dtype in (torch.int8, torch.bfloat16, torch.int8)
    )
    coordinator = SimpleNamespace(**{planned.PRIVATE + name: 0 for name in planned.SETTINGS})
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    engine = SimpleNamespace(
        device=torch.device("cpu"),
        module=module,
        optimizer=SimpleNamespace(parameter_offload=offload),
    )
    policy = SimpleNamespace(planned=True, device_gb=1.0, host_gb=None)
    planned.attached(engine, SimpleNamespace(config=SimpleNamespace(memory=policy)))  # type: ignore[arg-type]
    assert getattr(coordinator, planned.ATTRIBUTE).itemsize == 2


def refused(policy: dict[str, Any]) -> str:
    try:
        make_engine("plain", 0, policy).destroy()
    except ConfigError as error:
        return str(error)
    return ""


def test_what_cannot_be_planned_is_said_on_all_ranks(module_ranks: RunRanks) -> None:
    for error in module_ranks(2, refused, {"policy": "planned"}):
        assert error.startswith("compression.memory.device_gb: found None; a CPU does not say")
    for error in module_ranks(2, refused, {"policy": "planned", "host_gb": 1}):
        assert "compression.memory.host_gb" in error and "device nvme only" in error


def kept(jobs: list[NvmeJob]) -> list[dict[str, Any]]:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return nvme_trainer.run(jobs)


def test_states_that_fit_the_host_stay_out_of_files(module_ranks: RunRanks, tmp_path: Path) -> None:
    """Files get half of the bytes where two of four sub-groups are resident; weights are equal."""
    job = NvmeJob(str(tmp_path / "all"), steps=2, layers=4)
    numel = sum(p.numel() for p in nvme_trainer.Layers(4).parameters())
    block: dict[str, Any] = {**(job.block or {}), "memory": {
        "policy": "planned", "device_gb": 1.0, "host_gb": 16 * 0.505 * numel / 1e9}}  # fmt: skip
    fewer = replace(job, folder=str(tmp_path / "half"), block=block)
    for host, whole, half in module_ranks(2, kept, [replace(job, folder=None), job, fewer]):
        assert host["digests"] == whole["digests"] == half["digests"]
        raw, files = (half["ledger"][n] / whole["ledger"][n] for n in (1, 2))
        assert raw == pytest.approx(1_049_600 / 2_107_392, abs=0.001) and files <= 0.51
