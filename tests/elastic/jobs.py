"""One segment of a job under any engine: resume, train, save; what its ranks have seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import hybridcomp
from hybridcomp.channels import channels_of
from tests.patches.torch.trainer import forget, sum_of_residuals
from tests.training.test_checkpoint import sums

WIDTH, LENGTH, SAMPLES, MOST = 16, 100, 16, 4
FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}


@dataclass(frozen=True)
class Case:
    """An engine, "ddp", "fsdp2", "zero0" to "zero3", or a pipeline "pipe", and the codec of dp."""

    engine: str
    lossy: bool = False
    stages: int = 1

    @property
    def name(self) -> str:
        return f"{self.engine}_{'4bits' if self.lossy else 'none'}"

    @property
    def block(self) -> dict[str, Any]:
        return {"dp": FEEDBACK if self.lossy else "none", "min_bytes": 0, "hierarchy": "none"}


@dataclass
class Segment:
    """What a rank has seen: its samples and losses by step, residuals at the start and the end."""

    samples: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    resumed: tuple[int, int | None, int | None] = (0, 0, None)
    said: str = ""


class Data(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Samples by number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Layer(nn.Module):
    """A residual layer with weights of its own seed."""

    def __init__(self, seed: int, wide: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(wide * WIDTH, WIDTH, generator=generator) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, wide * WIDTH, generator=generator) / 8)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.tanh(values @ self.up.T) @ self.down.T


def loss_of(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


def target(values: Tensor) -> Tensor:
    return torch.sin(values.roll(1, 1))


def settings(case: Case, **extra: Any) -> dict[str, Any]:
    stage = int(case.engine[-1]) if case.engine.startswith("zero") else 1
    return {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": MOST,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "compression": case.block,
        **extra,
    }


def build_deepspeed(case: Case, wide: int = 3, **extra: Any) -> Any:
    import deepspeed
    import deepspeed.ops
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    hybridcomp.install()
    model: Any = nn.Sequential(Layer(0, wide), Layer(1, wide))
    if case.engine == "pipe":
        layers = [LayerSpec(Layer, seed, wide) for seed in range(2)]
        model = PipelineModule(
            layers, num_stages=case.stages, loss_fn=loss_of, partition_method="uniform"
        )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings(case, **extra)
    )
    return engine


def build_torch(case: Case, wide: int = 3) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(Layer(0, wide), Layer(1, wide))
    model = DistributedDataParallel(model) if case.engine == "ddp" else fully_shard(model)
    assert hybridcomp.attach(model, case.block) is not None
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def run(cases: list[Case], folder: str, steps: int, stop: int | None = None) -> list[Segment]:
    """Each case: go on from what its folder has, to step ``steps`` and save there."""
    found = []
    for case in cases:
        said = StringIO()
        place = Path(folder, case.name)
        place.mkdir(parents=True, exist_ok=True)
        is_torch = case.engine in ("ddp", "fsdp2")
        with contextlib.redirect_stdout(said):
            seen = (of_torch if is_torch else of_deepspeed)(case, place, steps)
        seen.said = said.getvalue()
        found.append(seen)
    return found


def batches(sampler: Any, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end: a loader for each epoch."""
    while True:
        yield from DataLoader(Data(), batch_size=micro, sampler=sampler)


def mean(loss: float) -> float:
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def of_torch(case: Case, place: Path, steps: int) -> Segment:
    model, optimizer = build_torch(case)
    sampler = hybridcomp.ElasticSampler(LENGTH, SAMPLES, tail="keep")
    where = hybridcomp.resume(model, place, optimizer=optimizer, sampler=sampler)
    attached = hybridcomp.attach(model)
    assert attached is not None and attached.step == where.step == sampler.steps
    seen = Segment(before=sum_of_residuals(attached))
    seen.resumed = (where.step, where.samples_seen, where.ranks)
    micro, accumulation = sampler.micro_batches(MOST)
    loader = batches(sampler, micro)
    while sampler.steps < steps:
        losses, drawn = [], []
        for number in range(accumulation):
            indices, values = next(loader)
            is_last = number == accumulation - 1
            if case.engine == "fsdp2":
                model.set_requires_gradient_sync(is_last)
            still = case.engine == "ddp" and not is_last
            with model.no_sync() if still else contextlib.nullcontext():
                loss = loss_of(model(values), target(values))
                torch.autograd.backward(loss / accumulation)
            losses.append(loss.item())
            drawn += indices.tolist()
        optimizer.step()
        optimizer.zero_grad()
        sampler.stepped()
        seen.samples.append(drawn)
        seen.losses.append(mean(sum(losses) / accumulation))
    seen.after = sum_of_residuals(attached)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "hybridcomp": hybridcomp.stateful(model),
             "sampler": sampler}  # fmt: skip
    save_sharded(state, checkpoint_id=place / f"step{steps}")
    hybridcomp.detach(model)
    forget()
    return seen


def of_deepspeed(case: Case, place: Path, steps: int) -> Segment:
    engine = build_deepspeed(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if case.engine == "pipe":
        rank, ranks = engine.grid.get_data_parallel_id(), ranks // case.stages
    sampler = hybridcomp.ElasticSampler(LENGTH, SAMPLES, tail="keep", rank=rank, ranks=ranks)
    where = hybridcomp.resume(engine, place, sampler=sampler)
    channels = channels_of(engine)
    assert channels is not None and channels.step == where.step == sampler.steps
    seen = Segment(before=sums(channels.residuals.state_dict()))
    seen.resumed = (where.step, where.samples_seen, where.ranks)
    assert engine.gradient_accumulation_steps() == sampler.micro_batches(MOST)[1]
    loader = batches(sampler, MOST)
    while sampler.steps < steps:
        drawn, losses = [], []
        micros = [next(loader) for _ in range(engine.gradient_accumulation_steps())]
        drawn = [index for indices, _ in micros for index in indices.tolist()]
        if case.engine == "pipe":
            losses = [float(engine.train_batch(iter([(v, target(v)) for _, v in micros])))]
        else:
            for _, values in micros:
                loss = loss_of(engine(values), target(values))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        sampler.stepped()
        seen.samples.append(drawn)
        seen.losses.append(mean(sum(losses) / len(losses)))
    seen.after = sums(channels.residuals.state_dict())
    engine.save_checkpoint(str(place), client_state={"sampler": sampler.state_dict()})
    engine.destroy()
    return seen
