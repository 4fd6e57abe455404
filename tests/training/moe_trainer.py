"""Tiny MoE trainings on several ranks, for tests of the expert-parallel seam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.in_turn import digest, in_turn, start_deepspeed
from tests.training.pipe_trainer import Outcome, messages

WIDTH, TOKENS, EXPERTS = 32, 64, 4


@dataclass(frozen=True)
class Job:
    """One training. ``block`` is the compression block, None runs unpatched."""

    steps: int = 20
    bf16: bool = False
    zero: int = 0
    checkpoint: bool = False
    nan_step: int = -1
    block: dict[str, Any] | None = None


class Model(nn.Module):
    """Linear, experts, linear; the targets are a linear map of the inputs."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        # no random token selection, which draws from the global generator
        self.experts = MoE(
            WIDTH, expert, num_experts=EXPERTS, ep_size=2, k=1, capacity_factor=1.5, use_rts=False
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.checkpoint = job.checkpoint

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.checkpoint:
            found: Tensor = torch.utils.checkpoint.checkpoint(
                lambda x: self.experts(x)[0], hidden, use_reentrant=True
            )
        else:
            found = self.experts(hidden)[0]
        loss: Tensor = (self.last(hidden + found) - targets).float().square().mean()
        return loss


def run(jobs: Sequence[Job]) -> list[Outcome]:
    """Run every job in turn; revert all patches for unpatched jobs."""
    return in_turn(jobs, train, lambda job: job.block is None)


def ds_config(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": job.zero},
        "steps_per_print": 10**9,
    }
    if job.bf16:
        config["bf16"] = {"enabled": True}
    if job.block is not None:
        config["compression"] = job.block
    return config


def make_engine(job: Job) -> Any:
    """Return a job's engine; all ranks have the same weights, except for experts."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    torch.manual_seed(0)
    model = Model(job)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adam(groups, lr=3e-3), config=ds_config(job)
    )
    return engine


def train_step(engine: Any, job: Job, step: int) -> float:
    """Run a step on this rank's inputs; return the loss."""
    import torch.distributed as dist

    dtype = next(engine.module.parameters()).dtype
    goal = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(TOKENS, WIDTH, generator=generator)
    targets = inputs @ goal
    if step == job.nan_step:
        inputs[0, 0] = float("nan")
    loss = engine(*(part.to(engine.device, dtype) for part in (inputs, targets)))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def train(job: Job) -> Outcome:
    """Train on this rank."""
    engine = make_engine(job)
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    parameters = {name: digest(p) for name, p in engine.module.named_parameters()}
    found = Outcome(losses, [], parameters, "", [], messages(engine))
    engine.destroy()
    return found


def exchange_rows(block: dict[str, Any]) -> dict[str, Any]:
    """Run AutoEP's all-to-all with unequal rows, as the layer does, forward and backward."""
    import torch.distributed as dist
    from deepspeed.module_inject import auto_ep_layer

    from hybridcomp.channels import ATTRIBUTE, Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.patches.ds.layers import moe
    from hybridcomp.seams.patching import Patch, apply_all, revert_all

    start_deepspeed()
    rank = dist.get_rank()
    splits = [[3, 40], [17, 0]]  # [from][to], in rows
    mine, theirs = splits[rank], [row[rank] for row in splits]
    rows = torch.randn(sum(mine), WIDTH, generator=torch.Generator().manual_seed(rank))
    rows[-1] = 0.0  # an empty slot

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        found: Tensor = auto_ep_layer._AllToAllV.apply(
            dist.group.WORLD, hidden_states, mine, theirs
        )
        return found

    def both_ways(layer: Any) -> tuple[Tensor, Tensor]:
        leaf = rows.clone().requires_grad_()
        out = layer(leaf)
        out.backward(torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos())
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    class Layer(nn.Module):
        pass

    native = both_ways(lambda hidden: forward(None, hidden))
    Layer.forward = moe.make_layer_forward(forward)
    layer = Layer()
    channels = Channels(CompressionConfig.parse(block))
    applied = apply_all(Patch(seam, make) for seam, make in moe.PATCHES)
    try:
        untagged = both_ways(layer)
        setattr(layer, ATTRIBUTE, channels)
        ours = both_ways(layer)
    finally:
        revert_all(applied)
    return {
        "native": native,
        "untagged": untagged,
        "ours": ours,
        "ledger": {
            key[1]: (int(e.messages), int(e.raw_nbytes), int(e.wire_nbytes))
            for key, e in channels.ledger.interval.items()
            if e.messages
        },
        "zeros": float(ours[0][-1].abs().max()) if rank == 1 else 0.0,
    }
