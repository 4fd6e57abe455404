"""Gradients of experts, whose group is smaller than their divisor."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RunRanks
from tests.selection import by_day
from tests.training import moe_trainer

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

STEPS = 4


def train(stage: int, block: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return parameters after training, and names of those with a residual.

    Uses plain gradient descent, which shows a wrong divisor that Adam would hide.
    """
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    import hybridcomp
    from hybridcomp.channels import channels_of
    from tests.training.in_turn import start_deepspeed

    start_deepspeed()
    if block is None:
        hybridcomp.uninstall()
    else:
        hybridcomp.install()
    job = moe_trainer.Job(zero=stage, block=block)
    torch.manual_seed(0)
    model = moe_trainer.Model(job)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    config = {**moe_trainer.ds_config(job), "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(groups, lr=0.5), config=config
    )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(moe_trainer.TOKENS, moe_trainer.WIDTH, generator=generator)
        engine.backward(engine(inputs, inputs.roll(1, dims=1)))
        engine.step()
    found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    channels = channels_of(engine)
    residuals = channels.residuals.state_dict()["sender"] if channels is not None else {}
    engine.destroy()
    return found, sorted(residuals)


@pytest.mark.parametrize("stage", by_day([0, 1, 2], [2]))
def test_experts_are_averaged_as_upstream_does(module_ranks: RunRanks, stage: int) -> None:
    gathers = {"zero": "mpc"} if stage else {}
    native = module_ranks(4, train, stage, None)
    lossless = module_ranks(4, train, stage, {"dp": "mpc", "min_bytes": 0, **gathers})
    start = module_ranks(4, first_parameters, stage)
    for (before,), (base, _), (coded, _) in zip(start, native, lossless, strict=True):
        experts = [name for name in base if "deepspeed_experts" in name]
        assert 0 < len(experts) < len(base)
        for name, values in base.items():
            moved = (values - before[name]).norm()
            # sums of four operands differ in the last bit; a wrong divisor would differ by
            # ``moved``
            assert (coded[name] - values).norm() <= 1e-4 * moved
        assert all(not torch.equal(base[name], before[name]) for name in experts)


def first_parameters(stage: int) -> tuple[dict[str, torch.Tensor]]:
    """Return the parameters before training."""
    torch.manual_seed(0)
    model = moe_trainer.Model(moe_trainer.Job(zero=stage))
    return ({name: p.detach().clone() for name, p in model.named_parameters()},)


@pytest.mark.parametrize("stage", by_day([0, 1, 2], [2]))
def test_experts_have_residuals(module_ranks: RunRanks, stage: int) -> None:
    dp = {"codec": "blockint", "bits": 4, "error_feedback": True}
    by_rank = module_ranks(4, train, stage, {"dp": dp, "min_bytes": 0})
    for rank, (parameters, residuals) in enumerate(by_rank):
        # ranks hold different experts under the same name, with separate residuals
        names = [f"{n}#ep{rank % 2}" if "deepspeed_experts" in n else n for n in parameters]
        assert residuals == sorted(names)
    # ranks r and r + 2 hold the same experts
    for mine, theirs in (by_rank[::2], by_rank[1::2]):
        for name, values in mine[0].items():
            assert torch.equal(values, theirs[0][name])
