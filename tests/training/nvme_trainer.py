"""Trainings with optimizer states on NVMe: a model large enough for the swapper's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.in_turn import start_deepspeed

#: elements of a layer: half of it has 1 MiB of bf16, so parameters and gradients use files too
WIDTH, LAYERS = 1024, 3
CODEC = {"states": "expcode"}


@dataclass(frozen=True)
class NvmeJob:
    """One training; ``folder``: None keeps states on the host; ``libaio``: use it if installed."""

    folder: str | None
    steps: int = 3
    layers: int = LAYERS
    accumulation: int = 1
    libaio: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    aio: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] | None = field(default_factory=lambda: {"offload": CODEC})


class Layers(nn.Module):
    """Equal linear layers after a small one."""

    def __init__(self, count: int = LAYERS) -> None:
        super().__init__()
        self.inner = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, values: Tensor) -> Tensor:
        values = self.inner(values)
        for layer in self.layers:
            values = values + torch.tanh(layer(values))
        return values


def ds_config(job: NvmeJob) -> dict[str, Any]:
    """The ds_config of a job."""
    optimizer: dict[str, Any] = {"device": "cpu"}
    if job.folder is not None:
        optimizer = {"device": "nvme", "nvme_path": job.folder, "buffer_count": 6, **job.optimizer}
    zero = {
        "stage": 3, "sub_group_size": 300_000, "offload_optimizer": optimizer,
        "stage3_param_persistence_threshold": 1000, **job.zero,
    }  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": job.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "aio": job.aio,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10_000,
    }
    if job.block is not None and job.folder is not None:
        config["compression"] = job.block
    return config


def make_engine(job: NvmeJob) -> Any:
    """Return a patched engine on this rank; without libaio, which may not be installed."""
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder

    import hybridcomp

    start_deepspeed()
    if not job.libaio:
        AsyncIOBuilder.is_compatible = lambda self, verbose=False: False
    hybridcomp.install()
    torch.manual_seed(0)
    model = Layers(job.layers)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(job)
    )
    return engine


def step(engine: Any, job: NvmeJob, number: int) -> None:
    """Run an optimizer step."""
    for micro in range(job.accumulation):
        seed = (number * job.accumulation + micro) * dist.get_world_size() + dist.get_rank()
        values = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        loss = engine(values.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()


def run(
    jobs: list[NvmeJob], between: Callable[[Any, NvmeJob, int], None] | None = None
) -> list[dict[str, Any]]:
    """Return each job's digests, bytes of files by kind and ledger on this rank."""
    from tests.training.trainer import digests

    found = []
    for job in jobs:
        engine = make_engine(job)
        for number in range(job.steps):
            step(engine, job, number)
            if between is not None:
                between(engine, job, number)
        found.append({"digests": digests(engine), **figures(engine)})
        engine.destroy()
    return found


def figures(engine: Any) -> dict[str, Any]:
    """Return the states' ledger, and the files' bytes by kind: raw and on disk."""
    from hybridcomp.channels import channels_of
    from hybridcomp.channels.state_files import DTYPES, SIZE, Footer

    channels = channels_of(engine)
    if channels is None or not hasattr(engine.optimizer, "optimizer_swapper"):
        return {}
    entry = channels.ledger.interval["offload", "states"]
    kinds: dict[str, list[int]] = {}
    folder = getattr(engine.optimizer.optimizer_swapper, "swap_folder", None)
    for path in sorted(Path(folder).glob("*.swp")) if folder else ():
        data = path.read_bytes()
        footer = Footer.of(data[-SIZE:])
        assert footer is not None, path
        name = path.name
        kind = name.partition("-")[0] if "-" in name else "master"
        sums = kinds.setdefault("gradient" if "gradient" in name else kind, [0, 0])
        sums[0] += footer.numel * DTYPES[footer.dtype].itemsize
        sums[1] += len(data)
    ledger = tuple(map(int, (entry.messages, entry.raw_nbytes, entry.wire_nbytes)))
    return {"files": kinds, "ledger": ledger}
