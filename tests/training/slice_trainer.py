"""Train the example in a pipeline over token slices under DeepSpeed, and whole.

Call ``run(jobs)`` on every rank (``tests.ranks.run_ranks``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.in_turn import Ledger, counting, in_turn, ledger_of, losses_of

VOCAB, LAYERS, WIDTH, HEADS, LENGTH, MICRO_BATCH = 49, 3, 32, 4, 24, 2
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Job:
    """One training. ``slices`` "": the whole model on every rank, without DeepSpeed."""

    slices: str = "7,9,5,3"
    steps: int = 4
    stage: int = 0
    tp: int = 1
    micro_batches: int = 2
    replicas: int = 1
    clip: float = 0.1
    block: dict[str, Any] | None = None
    folder: str | None = None  # folder of a checkpoint
    save: int = 0  # after this step
    load: bool = False
    more: dict[str, Any] = field(default_factory=dict)  # further keys of the DeepSpeed file


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float] = field(default_factory=list)
    valid: float = 0.0
    slices: tuple[int, ...] = ()
    layers: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=dict)
    told: dict[str, int | None] = field(default_factory=dict)


def run(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Run every job in turn; return hybridcomp's errors as text."""
    return in_turn(jobs, lambda job: train(job) if job.slices else whole(job), lambda job: False)


def batches(job: Job, replica: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a step's micro-batches of a learnable sequence."""
    for index in range(job.micro_batches):
        yield counting(1000 * replica + 10 * step + index, MICRO_BATCH, LENGTH, VOCAB)


def config_of(tp: int = 1) -> Any:
    from gpt.weights import ModelConfig

    return ModelConfig(vocabulary=VOCAB, layers=LAYERS, width=WIDTH, heads=HEADS, tp=tp)


def whole(job: Job) -> Outcome:
    """Train the plain model on the samples of all replicas."""
    from gpt import model

    module, loss_of = model.GPT(config_of()), model.loss_of(config_of())
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)  # type: ignore[arg-type]
    found = Outcome()
    for step in range(job.steps):
        optimizer.zero_grad()
        losses = []
        for replica in range(job.replicas):
            for tokens, labels in batches(job, replica, step):
                losses.append(loss_of(module(tokens), labels))
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if job.clip:
            nn.utils.clip_grad_norm_(module.parameters(), job.clip)
        optimizer.step()
        found.losses.append(float(loss.detach()))
    with torch.no_grad():
        valid = [loss_of(module(t), y) for r in range(job.replicas) for t, y in batches(job, r, 99)]
    found.valid = float(torch.stack(valid).mean())
    return found


def settings_of(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed file."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": job.micro_batches,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "gradient_clipping": job.clip,
        "zero_optimization": {"stage": job.stage},
        "steps_per_print": 10**9,
        **job.more,
    }
    if job.block is not None:
        found["compression"] = job.block
    return found


def train(job: Job) -> Outcome:
    """Train over two stages, built as scripts/examples/train_gpt.py does."""
    import deepspeed
    import train_gpt
    from gpt import layouts, token_slices

    from hybridcomp.channels import channels_of
    from hybridcomp.patches.ds.job_facts import layout

    arguments = train_gpt.parse([
        "--deepspeed_config", "x", "--pp", "2", "--cuts", "1,2", "--length", str(LENGTH),
        "--slices", job.slices, "--tp", str(job.tp),
    ])  # fmt: skip
    topology = layouts.lay_out(job.tp, 2)
    module, mpu = token_slices.build(config_of(job.tp), arguments, topology)
    engine, *_ = deepspeed.initialize(model=module, mpu=mpu, config=settings_of(job))
    trainer, found = token_slices.trainer(engine, arguments), Outcome()
    found.slices, found.told = module.slices, layout(engine)
    found.layers = [type(layer).__name__ for layer in module.stage.layers]
    found.losses = losses_of(trainer, job, lambda step: batches(job, trainer.share.rank, step))
    found.valid = trainer.evaluate(batches(job, trainer.share.rank, 99))
    found.ledger = ledger_of(channels_of(engine))
    engine.destroy()
    if job.tp > 1:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    dist.barrier()
    return found
