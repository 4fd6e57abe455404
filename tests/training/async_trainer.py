"""Small linear flushless pipelines on several ranks, and the versions that each stage held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.training.in_turn import in_turn

WIDTH, BATCH = 6, 4


@dataclass(frozen=True)
class AsyncJob:
    """One training; ``pipeline``: the block's key, None runs unpatched."""

    pipeline: dict[str, Any] | None
    micro_batches: int = 1
    steps: int = 20
    optimizer: str = "sgd"
    momentum: float = 0.0
    dtype: torch.dtype = torch.float64
    config: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.05
    checkpoint: bool | None = None  # recompute activations, reentrant or not
    save_at: int = 0  # a checkpoint after so many steps
    evaluate_at: int = 0
    grow_at: int = 0  # twice as many micro-batches after so many steps
    resume: bool = False  # from the checkpoint at ``save_at``
    break_at: int = -1  # the last stage fails in this step
    revert_at: int = -1  # uninstall after so many steps
    batches: int = 10**9  # micro-batches of the data


@dataclass
class AsyncOutcome:
    """A rank's results."""

    losses: list[float]
    weights: list[Tensor]
    evaluations: list[float]
    most_held: int = 1
    staleness: int = 0
    row: dict[str, float] | None = None
    collectives: int = 0  # collectives of all stages, in train_batch


def weight(stage: int) -> Tensor:
    """Return a stage's initial weight."""
    generator = torch.Generator().manual_seed(100 + stage)
    values = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return torch.eye(WIDTH, dtype=torch.float64) + 0.3 * values


def micro_batch(index: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a micro-batch."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1) + 0.1 * torch.randn(
        BATCH, WIDTH, generator=generator, dtype=torch.float64
    )


class Stage(nn.Module):
    """A linear layer with squashed input, so that gradients depend on weights."""

    def __init__(self, stage: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight(stage).to(dtype))

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(values) @ self.weight.T


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def data(job: AsyncJob, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(start, job.batches):
        inputs, targets = micro_batch(index)
        yield inputs.to(job.dtype), targets.to(job.dtype)


def build(job: AsyncJob, stages: int) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(Stage, stage, job.dtype) for stage in range(stages)]
    settings: dict[str, Any] = {}
    if job.checkpoint is not None:
        again = partial(torch.utils.checkpoint.checkpoint, use_reentrant=job.checkpoint)
        settings = {"activation_checkpoint_func": again, "activation_checkpoint_interval": 1}
    return PipelineModule(
        layers, num_stages=stages, loss_fn=mean_square, partition_method="uniform", **settings
    )


def optimizer_of(job: AsyncJob) -> Callable[[Any], torch.optim.Optimizer]:
    if job.optimizer == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, job.rate)
    return lambda parameters: torch.optim.SGD(parameters, job.rate, momentum=job.momentum)


def engine_of(job: AsyncJob, stages: int) -> Any:
    import deepspeed

    replicas = dist.get_world_size() // stages
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": job.micro_batches,
        "train_batch_size": BATCH * job.micro_batches * replicas,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **job.config,
    }
    if job.pipeline is not None:
        config["compression"] = {"preset": "none", "pipeline": job.pipeline, **job.block}
    torch.manual_seed(0)
    model = build(job, stages)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(job), model_parameters=list(model.parameters()),
        config=config,
    )  # fmt: skip
    # DeepSpeed reduces no fp64 gradients, and a single replica has none to reduce
    engine.pipeline_enable_backward_allreduce = job.dtype != torch.float64
    return engine


def run(stages: int, jobs: Sequence[AsyncJob], folder: str = "") -> list[AsyncOutcome]:
    """Run every job in turn; revert all patches for unpatched jobs."""
    found: list[AsyncOutcome] = in_turn(
        jobs, lambda job: train(job, stages, folder), lambda job: job.pipeline is None
    )
    return found


COLLECTIVES = (
    "all_reduce", "broadcast", "barrier", "all_gather_into_tensor", "reduce_scatter_tensor",
)  # fmt: skip


@contextmanager
def followed() -> Iterator[list[str]]:
    """Yield a list that gets the names of collectives of more than one rank."""
    called: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if dist.get_world_size(kwargs.get("group")) > 1:
                called.append(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, watched(name)))
        yield called


def train(job: AsyncJob, stages: int, folder: str) -> AsyncOutcome:
    import hybridcomp
    from hybridcomp.patches.ds.pipeline.pipe import PIPE
    from hybridcomp.session.engine_session import session_of

    engine = engine_of(job, stages)
    first = 0
    if job.resume:
        engine.load_checkpoint(folder, tag="saved")
        first = job.save_at
    source = data(job, first * job.micro_batches)
    losses, evaluations, collectives = [], [], 0
    for step in range(first, job.steps):
        if step == job.break_at and engine.is_last_stage():
            raise ValueError("the last stage breaks")
        if step == job.revert_at:
            hybridcomp.uninstall()
        with followed() as called:
            losses.append(float(engine.train_batch(source)))
        collectives += len(called)
        if step + 1 == job.evaluate_at:
            evaluations.append(float(engine.eval_batch(data(job))))
        if step + 1 == job.grow_at:
            engine.set_train_batch_size(2 * engine.train_batch_size())
        if step + 1 == job.save_at and not job.resume:
            engine.save_checkpoint(folder, tag="saved")
    found = AsyncOutcome(
        losses,
        [p.detach().clone() for p in engine.module.parameters()],
        evaluations,
        collectives=collectives,
    )
    pipe = getattr(engine, PIPE, None)
    if pipe is not None and pipe.waitless is not None:
        found.most_held = pipe.waitless.versions.most_held
        found.staleness = pipe.waitless.order.staleness
        session = session_of(engine)
        assert session is not None
        (row,) = [f.row() for f in session.followers if f.name == "pipeline"]
        found.row = None if row is None else dict(row)
    engine.destroy()
    return found
