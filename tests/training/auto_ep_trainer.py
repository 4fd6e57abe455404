"""Tiny trainings under DeepSpeed's AutoEP: a model with transformers' Mixtral blocks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, TOP = 16, 24, 4, 2
LAYERS = 2


@dataclass(frozen=True)
class Job:
    """One training; ``family`` names an AutoEP preset."""

    stage: int = 2
    family: str = "mixtral"


class Router(nn.Module):
    """Scores of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight)


class Experts(nn.Module):
    """All experts in two tensors, as in transformers: gate and up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)


class SharedExpert(nn.Module):
    """The expert of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.down_proj(
            nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return found


class Block(nn.Module):
    """The block that AutoEP replaces."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()
        if job.family == "qwen3_moe":
            self.shared_expert = SharedExpert()
            self.shared_expert_gate = nn.Linear(WIDTH, 1, bias=False)


class Layer(nn.Module):
    """A norm and the block."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Block(job)

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.mlp(self.norm(hidden))
        total: Tensor = hidden + (found[0] if isinstance(found, tuple) else found)
        return total


class Inner(nn.Module):
    """The layers."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(job) for _ in range(LAYERS))


class Model(nn.Module):
    """Layers with experts; the loss is the square of the output."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_local_experts=EXPERTS, num_experts=EXPERTS, num_experts_per_tok=TOP,
            model_type=job.family, norm_topk_prob=True, hidden_act="silu",
        )  # fmt: skip
        self.model = Inner(job)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.model.embed(hidden)
        for layer in self.model.layers:
            hidden = layer(hidden)
        loss: Tensor = hidden.float().square().mean()
        return loss


def make_engine(job: Job) -> tuple[Any, dict[str, Tensor]]:
    """Return a job's engine, and the model's tensors before AutoEP sharded it, in bf16."""
    import deepspeed

    torch.manual_seed(0)
    model = Model(job)
    before = {name: one.detach().bfloat16() for name, one in model.named_parameters()}
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
            "steps_per_print": 10**9, "zero_optimization": {"stage": job.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_allow_untested_optimizer": True,
            "expert_parallel": {
                "enabled": True, "autoep_size": 2, "preset_model": job.family,
                "use_grouped_mm": False,
            },
        },
    )  # fmt: skip
    return engine, before


def train_step(engine: Any, step: int) -> float:
    """Run a step on this rank's inputs; return the loss."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(1, 8, WIDTH, generator=generator).to(torch.bfloat16)
    loss = engine(inputs)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())
