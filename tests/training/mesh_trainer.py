"""Train the example's model on a mesh of 2 x 2 ranks under DeepSpeed, and whole.

Call ``run(jobs)`` on every rank (``tests.ranks.run_ranks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.in_turn import counting, in_turn, ledger_of, losses_of

VOCAB, LAYERS, WIDTH, HEADS, LENGTH, MICRO_BATCH = 49, 2, 32, 4, 16, 4
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Job:
    """One training. ``tp2d`` 1: whole on every rank, without DeepSpeed."""

    tp2d: int = 2
    steps: int = 4
    stage: int = 0
    norm: str = "rmsnorm"
    tied: bool = False
    block: dict[str, Any] | None = None
    folder: str | None = None  # folder of a checkpoint
    save: int = 0  # after this step
    load: bool = False
    plain: str | None = None  # output file of the plain model's weights
    start_from: str | None = None  # input file of the plain model's weights


@dataclass
class Outcome:
    """A rank's results; ``ledger``: messages, native ones, raw and sent bytes of tp2d by kind."""

    losses: list[float] = field(default_factory=list)
    ledger: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def run(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Run every job in turn; return hybridcomp's errors as text."""
    return in_turn(jobs, lambda job: whole(job) if job.tp2d == 1 else train(job), lambda job: False)


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a micro-batch."""
    return counting(1000 * replica + step, MICRO_BATCH, LENGTH, VOCAB)


def config_of(job: Job) -> Any:
    from gpt.weights import ModelConfig

    return ModelConfig(
        vocabulary=VOCAB, layers=LAYERS, width=WIDTH, heads=HEADS, norm=job.norm,  # type: ignore[arg-type]
        tied=job.tied, tp2d=job.tp2d,
    )  # fmt: skip


def whole(job: Job) -> Outcome:
    """Train the plain model on the samples of all meshes of four ranks."""
    from gpt import model

    config = config_of(job)
    module, loss_of = model.GPT(config), model.loss_of(config)
    if job.start_from:
        module.load_state_dict(torch.load(job.start_from))
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)  # type: ignore[arg-type]
    found, replicas = Outcome(), dist.get_world_size() // 4
    for step in range(job.steps):
        pairs = [batch(replica, step) for replica in range(replicas)]
        tokens, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        loss = loss_of(module(tokens), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        found.losses.append(float(loss.detach()))
    if job.plain and dist.get_rank() == 0:
        torch.save(module.state_dict(), job.plain)
    dist.barrier()
    return found


def train(job: Job) -> Outcome:
    """Train on a mesh, built as scripts/examples/train_gpt.py does."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid
    from gpt import loop, model, two_dimensional

    from hybridcomp.channels import NAME, channels_of

    topology, config = two_dimensional.start(job.tp2d), config_of(job)
    module = model.GPT(config)
    if job.start_from:
        two_dimensional.load_plain(module, Path(job.start_from))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": job.stage},
        "steps_per_print": 10**9,
    }
    if job.block is not None:
        settings["compression"] = job.block
    mpu = PipelineParallelGrid(topology=topology)
    engine, *_ = deepspeed.initialize(model=module, mpu=mpu, config=settings)
    trainer = loop.PlainTrainer(engine, model.loss_of(config))
    found = Outcome(losses_of(trainer, job, lambda step: iter([batch(trainer.share.rank, step)])))
    if job.plain:
        two_dimensional.save_plain(engine.module, Path(job.plain))
    channels = channels_of(engine)
    if channels is not None:
        found.ledger = {kind: row for (name, kind), row in ledger_of(channels).items()
                        if name == "tp2d"}  # fmt: skip
        found.names = [getattr(parameter, NAME) for parameter in engine.module.parameters()]
    engine.destroy()
    return found
