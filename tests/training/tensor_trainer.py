"""Train the example's model, sharded by megatron-core and DeepSpeed, for tests of 3D.

Call ``run(jobs)`` on every rank (``tests.ranks.run_ranks``) with many jobs: importing DeepSpeed and
megatron-core takes longer than all trainings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import forget_inherited
from tests.training.in_turn import Ledger, counting, digest, in_turn, ledger_of, losses_of

VOCAB, LAYERS, WIDTH, HEADS, LENGTH, MICRO_BATCH = 49, 3, 32, 4, 16, 2


@dataclass(frozen=True)
class Job:
    """One training. ``block`` is the compression block, None runs unpatched."""

    tp: int = 2
    pp: int = 2
    steps: int = 3
    micro_batches: int = 2
    bf16: bool = False
    tied: bool = False
    partitioned: bool = True  # send activations in parts, one per tensor rank
    same_data: bool = False  # on all replicas: results do not depend on their number
    folder: str | None = None  # folder of a checkpoint
    save: int = 0  # after this step
    load: bool = False
    block: dict[str, Any] | None = None


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)  # digest of the bytes, by name
    whole: dict[str, str] = field(default_factory=dict)  # unsharded parameters, as digests
    ledger: Ledger = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # keys of the residuals
    step: int = 0  # counted by the channels
    lent: bool = False  # whether layers without an engine use the engine's channels


def run(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Run every job in turn; revert all patches for unpatched jobs; return errors as text."""
    known = "megatron.core.tensor_parallel" in sys.modules
    import megatron.core.tensor_parallel  # noqa: F401

    if not known:
        forget_inherited()  # drop inherited megatron-core objects as well
    return in_turn(jobs, _train, lambda job: job.block is None)


def _train(job: Job) -> Outcome:
    try:
        return train(job)
    finally:
        _forget_groups()


def _forget_groups() -> None:
    """Destroy every group but the world: each has polling threads."""
    from deepspeed.runtime.pipe import p2p
    from megatron.core import parallel_state

    dist.barrier()  # a rank may still be in its last message
    parallel_state.destroy_model_parallel()
    p2p._groups = None
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def ds_config(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": job.micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "bf16": {"enabled": job.bf16},
        "pipeline": {"pipe_partitioned": job.partitioned, "grad_partitioned": job.partitioned},
    }
    return config if job.block is None else {**config, "compression": job.block}


def batches(
    job: Job, replica: int, step: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a step's micro-batches."""
    for number in range(job.micro_batches):
        seed = 1000 * (0 if job.same_data else replica) + 10 * step + number
        inputs, labels = counting(seed, MICRO_BATCH, LENGTH, VOCAB)
        yield inputs.to(device), labels.to(device)


def build(job: Job) -> Any:
    """Build engine and trainer as scripts/examples/train_gpt.py does."""
    import deepspeed
    from gpt import loop, model, tensor_parallel, weights

    topology = tensor_parallel.start(job.tp, job.pp)
    config = weights.ModelConfig(
        vocabulary=VOCAB, layers=LAYERS, width=WIDTH, heads=HEADS, tied=job.tied, tp=job.tp
    )
    if job.pp > 1:
        module, mpu = model.pipeline(config, topology=topology), None
    else:
        module, mpu = model.GPT(config), tensor_parallel.grid(topology)
    engine, *_ = deepspeed.initialize(model=module, mpu=mpu, config=ds_config(job))
    tensor_parallel.check_groups(engine.mpu)
    if job.pp > 1:
        return engine, loop.PipeTrainer(engine)
    return engine, loop.PlainTrainer(engine, model.loss_of(config))


def train(job: Job) -> Outcome:
    """Train on this rank."""
    from hybridcomp.channels import NAME, channels_of
    from hybridcomp.session import process

    torch.manual_seed(0)
    engine, trainer = build(job)
    found = Outcome()
    found.losses = losses_of(
        trainer, job, lambda step: batches(job, trainer.share.rank, step, engine.device)
    )
    named = dict(engine.module.named_parameters())
    found.parameters = {name: digest(parameter) for name, parameter in named.items()}
    cut = [name for name, p in named.items() if getattr(p, "tensor_model_parallel", False)]
    found.whole = {name: text for name, text in found.parameters.items() if name not in cut}
    channels = channels_of(engine)
    if channels is not None:
        found.ledger = ledger_of(channels)
        found.names = [getattr(parameter, NAME) for parameter in named.values()]
        found.step, found.lent = channels.step, process.current() is channels
    engine.destroy()
    return found
