"""Train the example with sharded sequences, combined with tensor ranks, stages and replicas.

Call ``run(jobs)`` on every rank (``tests.ranks.run_ranks``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.training import slice_trainer
from tests.training.in_turn import Ledger, in_turn, ledger_of


@dataclass(frozen=True)
class Job:
    """A training over ``cp`` ranks a sequence; the remaining ranks are replicas."""

    cp: int = 2
    tp: int = 1
    pp: int = 1
    stage: int = 0
    steps: int = 3
    block: dict[str, Any] | None = None


@dataclass
class Outcome:
    """A rank's results, and the losses of the whole model on the same samples.

    told: logged layout.
    """

    losses: list[float]
    whole: list[float]
    ledger: Ledger = field(default_factory=dict)
    told: dict[str, int | None] = field(default_factory=dict)


def run(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Run every job in turn; return hybridcomp's errors as text."""
    return in_turn(jobs, train, lambda job: False)


def build(job: Job) -> Any:
    """Return the trainer of scripts/examples/train_gpt.py."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid
    from gpt import context_parallel, layouts, loop, model
    from gpt.weights import ModelConfig

    topology = layouts.lay_out(job.tp, job.pp, 1, job.cp)
    layouts.cut_sequences(job.cp, job.tp, job.pp, slice_trainer.LENGTH)
    config = ModelConfig(
        vocabulary=slice_trainer.VOCAB, layers=slice_trainer.LAYERS, width=slice_trainer.WIDTH,
        heads=slice_trainer.HEADS, tp=job.tp, cp=job.cp,
    )  # fmt: skip
    cut = {"num_stages": job.pp} if topology is None else {"topology": topology}
    module = model.GPT(config) if job.pp == 1 else model.pipeline(config, (), **cut)
    # DeepSpeed's gradient norm (ZeRO 0) covers the first stage only
    settings = slice_trainer.settings_of(
        slice_trainer.Job(stage=job.stage, block=job.block, clip=0.0)
    )
    mpu = PipelineParallelGrid(topology=topology) if topology and job.pp == 1 else None
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), mpu=mpu, config=settings
    )
    plain = job.pp == 1
    trainer: Any = (
        loop.PlainTrainer(engine, model.loss_of(config)) if plain else loop.PipeTrainer(engine)
    )
    trainer.share = context_parallel.share(trainer.share)
    return trainer


def train(job: Job) -> Outcome:
    """Run a training, and the whole model's on the samples of all replicas."""
    from hybridcomp.channels import channels_of
    from hybridcomp.patches.ds.job_facts import layout

    trainer = build(job)
    share, found = trainer.share, Outcome([], [])

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, labels in slice_trainer.batches(slice_trainer.Job(), share.rank, step):
            yield share.cut(tokens), share.cut(labels)

    found.losses = [trainer.step(batches(step)) for step in range(job.steps)]
    found.told = layout(trainer.engine)
    found.ledger = ledger_of(channels_of(trainer.engine))
    trainer.engine.destroy()
    if job.tp > 1:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    dist.barrier()
    whole = slice_trainer.Job(slices="", steps=job.steps, replicas=share.world_size, clip=0.0)
    found.whole = slice_trainer.whole(whole).losses
    return found
