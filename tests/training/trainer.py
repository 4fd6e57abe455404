"""Tiny data-parallel trainings, for tests of the ZeRO seams.

Call ``run(jobs)`` on every rank with many jobs: importing DeepSpeed takes longer than all
trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

from tests.training.in_turn import digest, ledger_of, start_deepspeed

WIDTH, HIDDEN = 24, 53
#: smaller than the largest parameter, which gives several buckets, one with a single parameter
BUCKET = 2000
#: DeepSpeed 0.19.0 gathers several whole parameters at once and waits only for the last, which on
#: gloo leaves uninitialized memory in the others: at most one may be persistent
WAITS_FOR_ALL = Version(version("deepspeed")) >= Version("0.19.8")


@dataclass(frozen=True)
class Job:
    """One training. ``block`` is the compression block, None runs unpatched."""

    stage: int = 0
    dtype: str = "fp32"
    bf16_optimizer: bool = False
    accumulation: int = 1
    steps: int = 50
    lr: float = 1e-2
    nan_step: int = -1  # this step's first input of the last rank is NaN
    zero: dict[str, Any] = field(default_factory=dict)  # more keys of zero_optimization
    ds_json: dict[str, Any] = field(default_factory=dict)  # more keys of the ds_config
    block: dict[str, Any] | None = None


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float]
    digests: dict[str, str]  # digests of the bytes of the exact parameters, by name
    skipped: list[bool]  # by step: whether the optimizer step was skipped
    #: dimension, with its direction where it has two -> (messages, native messages, raw bytes, wire
    #: bytes)
    ledger: dict[str, tuple[int, int, int, int]]
    residual: float  # norm of the error-feedback residuals
    #: dimension -> bytes between nodes: native, sent
    between: dict[str, tuple[int, int]] = field(default_factory=dict)


class Tiny(nn.Module):
    """Odd sizes, a norm, biases, a one-element parameter and one larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.outer = nn.Linear(HIDDEN, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.inner(values)))
        hidden = hidden + torch.tanh(self.middle(hidden)) * self.scale
        result: Tensor = self.outer(hidden)
        return result


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: a slightly nonlinear rotation of the inputs."""
    generator = torch.Generator().manual_seed(100_003 * rank + step)
    values = torch.randn(8, WIDTH, generator=generator)
    return values.to(dtype), torch.sin(values.roll(1, dims=1)).to(dtype)


def ds_config(job: Job) -> dict[str, Any]:
    """Return a job's ds_config."""
    zero = {
        "stage": job.stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 60 if WAITS_FOR_ALL else 1,
        "stage3_prefetch_bucket_size": 2000,
        **job.zero,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": job.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": job.lr, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10_000,
    }
    if job.dtype != "fp32":
        config[job.dtype] = {"enabled": True}
    if job.bf16_optimizer:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if job.block is not None:
        config["compression"] = job.block
    return {**config, **job.ds_json}


def make_engine(
    job: Job, model: nn.Module | None = None, groups: Sequence[dict[str, Any]] | None = None
) -> Any:
    """Return an engine on this rank, patched if the job has a block; ``groups`` of parameters."""
    import deepspeed

    import hybridcomp

    start_deepspeed()
    if job.block is None:
        hybridcomp.uninstall()
    else:
        hybridcomp.install()
    torch.manual_seed(0)
    model = Tiny() if model is None else model
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()) if groups is None else list(groups),
        config=ds_config(job),
    )
    return engine


def train_step(engine: Any, job: Job, step: int) -> float:
    """Run all micro-batches of an optimizer step; return this rank's mean loss."""
    rank = dist.get_rank()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[job.dtype]
    total = 0.0
    for micro in range(job.accumulation):
        values, targets = batch(rank, step * job.accumulation + micro, dtype)
        if step == job.nan_step and rank == dist.get_world_size() - 1:
            values[0, 0] = math.nan
        values, targets = values.to(engine.device), targets.to(engine.device)
        loss = (engine(values) - targets).float().square().mean()
        engine.backward(loss)
        engine.step()
        total += loss.item() / job.accumulation
    return total


def train(job: Job, each: Callable[[Any, int], None] | None = None) -> Outcome:
    """Train; ``each(engine, step)`` is called after every step."""
    from hybridcomp.channels import channels_of
    from hybridcomp.dimensions import ONE_WAY

    engine = make_engine(job)
    losses, skipped = [], []
    for step in range(job.steps):
        before = engine.skipped_steps
        losses.append(train_step(engine, job, step))
        skipped.append(engine.skipped_steps != before)
        if each is not None:
            each(engine, step)
    channels: Any = channels_of(engine)
    ledger: dict[str, tuple[int, int, int, int]] = {}
    between: dict[str, tuple[int, int]] = {}
    for (dimension, way), figures in ledger_of(channels).items():
        name = dimension if dimension in ONE_WAY else f"{dimension}.{way}"
        entry = channels.ledger.interval[dimension, way]
        ledger[name] = figures
        between[name] = int(entry.inter_raw_nbytes), int(entry.inter_nbytes)
    residual = 0.0 if channels is None else channels.residuals.norm()
    outcome = Outcome(losses, digests(engine), skipped, ledger, residual, between)
    engine.destroy()
    return outcome


def parameters(engine: Any) -> dict[str, Tensor]:
    """Return copies of the whole parameters, by name; at stage 3 gathered exactly."""
    from deepspeed import zero

    partitioned = hasattr(engine.optimizer, "fp16_groups")
    found = {}
    for name, parameter in engine.module.named_parameters():
        with zero.GatheredParameters([parameter], enabled=partitioned):  # see WAITS_FOR_ALL
            found[name] = parameter.detach().clone()
    return found


def write_into(engine: Any, how: str) -> None:
    """Write into the weights or read them, on one rank or on all."""
    import hybridcomp
    from hybridcomp.channels import channels_of

    with torch.no_grad():
        if how == "one rank" and dist.get_rank() == 1:
            engine.module.middle.weight[0, 0] += 1
        elif how == "load_state_dict":
            state = parameters(engine)
            engine.module.load_state_dict({name: value * 0.9 for name, value in state.items()})
            engine.optimizer.refresh_fp32_params()
    if how == "resync" and channels_of(engine) is not None:
        hybridcomp.resync(engine)


def digests(engine: Any) -> dict[str, str]:
    """Hash the parameters' bytes."""
    return {name: digest(values) for name, values in parameters(engine).items()}


def run(jobs: Sequence[Job]) -> list[Outcome]:
    """Return all jobs' results on this rank."""
    return [train(job) for job in jobs]


def final_loss(outcomes: Sequence[Outcome]) -> float:
    """Return the mean over ranks and the last ten steps."""
    tails = [outcome.losses[-10:] for outcome in outcomes]
    return math.fsum(map(math.fsum, tails)) / sum(map(len, tails))
