"""One segment of a job under any engine: resume, train, save; what its ranks have seen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import hybridcomp
from hybridcomp.channels import channels_of
from hybridcomp.codecs.words import DTYPES
from hybridcomp.elastic.batches import micro_batches
from hybridcomp.errors import HybridcompError
from hybridcomp.patches.common.frozen_layers import frozen_of
from hybridcomp.patches.ds.checkpoint import conversion
from tests.patches.torch.trainer import forget, sum_of_residuals
from tests.training.in_turn import start_deepspeed
from tests.training.test_checkpoint import sums

WIDTH, LENGTH, SAMPLES, MOST = 16, 100, 16, 4
FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}


@dataclass(frozen=True)
class Case:
    """An engine and its settings.

    Attributes:
        engine: "ddp", "fsdp2", "zero0" to "zero3", a pipeline at ZeRO 1 "pipe" or without "pipe0",
            "megatron", "megatron-sharded" with its distributed optimizer, "megatron-buckets" with
            that optimizer's states saved as they lie.
        lossy: whether gradients are sent in 4 bits, with error feedback.
        stages: of a pipeline; 0: two where the ranks are even.
        samples: of a step.
        freezes: before which step, counted from 0, the first layer is frozen; None: before none.
    """

    engine: str
    lossy: bool = False
    stages: int = 1
    dtype: str = "fp32"
    samples: int = SAMPLES
    freezes: int | None = None

    @property
    def name(self) -> str:
        parts = [self.engine, "4bits" if self.lossy else "none"]
        parts += [self.dtype] * (self.dtype != "fp32") + [f"frozen{self.freezes}"] * (
            self.freezes is not None
        )
        return "_".join(parts)

    @property
    def block(self) -> dict[str, Any]:
        # one replica alone sends nothing
        return {"dp": FEEDBACK if self.lossy else "none", "min_bytes": 0, "hierarchy": "none",
                "on_unsupported": "native"}  # fmt: skip

    @property
    def is_pipeline(self) -> bool:
        return self.engine.startswith("pipe")

    @property
    def is_summed(self) -> bool:
        """Return whether a segment's residuals are already summed over the ranks."""
        return self.engine in ("ddp", "fsdp2")

    def parts(self) -> int:
        """Return how many ranks share a replica."""
        return self.stages or (1 if dist.get_world_size() % 2 else 2)

    def cast(self, values: Tensor) -> Tensor:
        return values.to(DTYPES[self.dtype])


@dataclass
class Segment:
    """A rank's samples and losses by step, and its residuals at the start and the end."""

    samples: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    resumed: tuple[int, int | None, int | None] = (0, 0, None)
    frozen: tuple[str, ...] = ()
    refused: str = ""
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
    return (found.float() - wanted.float()).square().mean()


def target(values: Tensor) -> Tensor:
    return torch.sin(values.roll(1, 1))


def ds_config(stage: int, dtype: str, micro: int, **extra: Any) -> dict[str, Any]:
    """Return a configuration of DeepSpeed with torch's AdamW."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **extra,
    }
    if dtype != "fp32":
        found[dtype] = {"enabled": True}
    if dtype == "fp16":
        found["fp16"]["initial_scale_power"] = 8
    return found


def settings(case: Case, **extra: Any) -> dict[str, Any]:
    stage = 0 if case.engine == "pipe0" else 1 if case.is_pipeline else int(case.engine[-1])
    replicas = dist.get_world_size() // (case.parts() if case.is_pipeline else 1)
    micro, _ = micro_batches(case.samples, replicas, MOST)
    given = {"train_batch_size": case.samples, "compression": case.block, **extra}
    return ds_config(stage, case.dtype, given.pop("train_micro_batch_size_per_gpu", micro), **given)


def engine_of(model: Any, config: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine for a model."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def pipeline_of(layer: type, arguments: list[tuple[Any, ...]], stages: int, **given: Any) -> Any:
    """Return DeepSpeed's pipeline of layers, one for each tuple of arguments."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(layer, *one) for one in arguments]
    return PipelineModule(
        layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform", **given
    )


def build_deepspeed(case: Case, wide: int = 3, **extra: Any) -> Any:
    start_deepspeed()
    hybridcomp.install()
    each = [(0, wide), (1, wide)]
    if case.is_pipeline:
        return engine_of(pipeline_of(Layer, each, case.parts()), settings(case, **extra))
    return engine_of(nn.Sequential(*(Layer(*one) for one in each)), settings(case, **extra))


def build_torch(case: Case, wide: int = 3) -> tuple[Any, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = nn.Sequential(Layer(0, wide), Layer(1, wide))
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policy = bf16 if case.dtype == "bf16" else MixedPrecisionPolicy()
    if case.engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = fully_shard(model, mp_policy=policy)
    assert hybridcomp.attach(model, case.block) is not None
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Within:
    """Run DeepSpeed's converter at once in this process instead of a new one."""

    def __init__(self, words: list[str], stdout: Any, **_: Any) -> None:
        from deepspeed.checkpoint import ds_to_universal

        one = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        called = patch.object(sys, "argv", [*words[2:], *one])
        with Path(stdout.name).open("w") as said, contextlib.redirect_stdout(said), called:
            ds_to_universal.main(ds_to_universal.parse_arguments())
        self.returncode = 0

    def poll(self) -> int:
        return self.returncode


def run(
    cases: list[Case], folder: str, steps: int, within: bool = False, save: bool = True
) -> list[Segment]:
    """Resume each case from its folder, train it to step ``steps`` and save it there.

    ``within``: whether to convert checkpoints in this process; a new one takes five seconds.
    """
    found = []
    for case in cases:
        said = StringIO()
        place = Path(folder, case.name)
        place.mkdir(parents=True, exist_ok=True)
        swap = patch(f"{conversion.__name__}.subprocess.Popen", Within)
        with contextlib.redirect_stdout(said), swap if within else contextlib.nullcontext():
            try:
                seen = segment_of(case)(case, place, steps, save)
            except HybridcompError as error:  # the same on all ranks
                seen = Segment(refused=f"{type(error).__name__}: {error}")
        seen.said = said.getvalue()
        found.append(seen)
    return found


def segment_of(case: Case) -> Callable[[Case, Path, int, bool], Segment]:
    if case.engine.startswith("megatron"):
        from tests.elastic.megatron import segment

        return segment
    return of_torch if case.is_summed else of_deepspeed


def freeze_when_due(case: Case, engine: Any, step: int) -> None:
    if case.freezes == step:
        hybridcomp.freeze(engine, ["0"])


def frozen_in(engine: Any) -> tuple[str, ...]:
    found = frozen_of(engine)
    return () if found is None else tuple(sorted(found.everywhere))


def batches(data: Any, sampler: Any, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches without end, from a loader for each epoch."""
    while True:
        yield from DataLoader(data, batch_size=micro, sampler=sampler)


def mean(loss: float) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def of_torch(case: Case, place: Path, steps: int, save: bool) -> Segment:
    model, optimizer = build_torch(case)
    sampler = hybridcomp.ElasticSampler(LENGTH, case.samples, tail="keep")
    where = hybridcomp.resume(model, place, optimizer=optimizer, sampler=sampler)
    attached = hybridcomp.attach(model)
    assert attached is not None and attached.step == where.step == sampler.steps
    seen = Segment(before=sum_of_residuals(attached))
    seen.resumed = (where.step, where.samples_seen, where.ranks)
    micro, accumulation = sampler.micro_batches(MOST)
    loader = batches(Data(), sampler, micro)
    while sampler.steps < steps:
        freeze_when_due(case, model, sampler.steps)
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
    seen.after, seen.frozen = sum_of_residuals(attached), frozen_in(model)
    if save:
        save_torch(model, optimizer, place / f"step{steps}", sampler=sampler)
    hybridcomp.detach(model)
    forget()
    return seen


def save_torch(model: Any, optimizer: Any, folder: Path, **more: Any) -> None:
    """Save as docs/elastic.md says."""
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "hybridcomp": hybridcomp.stateful(model)}
    save_sharded({**state, **more}, checkpoint_id=folder)


def of_deepspeed(case: Case, place: Path, steps: int, save: bool) -> Segment:
    engine = build_deepspeed(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if case.is_pipeline:
        rank, ranks = engine.grid.get_data_parallel_id(), ranks // case.parts()
    sampler = hybridcomp.ElasticSampler(LENGTH, case.samples, tail="keep", rank=rank, ranks=ranks)
    where = hybridcomp.resume(engine, place, sampler=sampler)
    channels = channels_of(engine)
    assert channels is not None
    assert channels.step == where.step == sampler.steps
    seen = Segment(before=sums(channels.residuals.state_dict()))
    seen.resumed = (where.step, where.samples_seen, where.ranks)
    micro, accumulation = sampler.micro_batches(MOST)
    assert engine.gradient_accumulation_steps() == accumulation
    loader = batches(Data(), sampler, micro)
    while sampler.steps < steps:
        freeze_when_due(case, engine, sampler.steps)
        losses = []
        micros = [next(loader) for _ in range(accumulation)]
        drawn = [index for indices, _ in micros for index in indices.tolist()]
        pairs = [(case.cast(values), target(values)) for _, values in micros]
        if case.is_pipeline:
            losses = [float(engine.train_batch(iter(pairs)))]
        else:
            for values, wanted in pairs:
                loss = loss_of(engine(values), wanted)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        sampler.stepped()
        seen.samples.append(drawn)
        seen.losses.append(mean(sum(losses) / len(losses)))
    seen.after, seen.frozen = sums(channels.residuals.state_dict()), frozen_in(engine)
    if save:
        engine.save_checkpoint(str(place), client_state={"sampler": sampler.state_dict()})
    engine.destroy()
    return seen
