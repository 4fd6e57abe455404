"""Train a small model under FSDP2 or DDP on one rank of a job: native, attached, resumed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.channels.residuals.saved_residuals import held_in
from hybridcomp.job.devices import default_device
from hybridcomp.patches.torch import steps
from hybridcomp.patches.torch.attached import Attached

VOCABULARY, WIDTH, BATCH, LENGTH = 51, 24, 2, 6


@dataclass(frozen=True)
class Job:
    """One run."""

    engine: Literal["ddp", "fsdp2"] = "fsdp2"
    block: dict[str, Any] | None = None
    steps: int = 50
    micro_batches: int = 1
    replicas: int = 1  # replicas of an HSDP mesh
    reshard: bool | int | None = None
    bf16: bool = False
    reduce_dtype: str | None = None
    sync_last: bool = True  # accumulate unsharded, or reduce every micro-batch
    unused: bool = False  # a layer is skipped in odd steps
    static_graph: bool = False
    bucket_mb: float = 0.004
    list_group: bool = False  # a group of two modules
    divide: float | None = None
    ordered: bool = False  # native sums in fp32 and rank order, like encoded ones
    seed: int = 0
    lr: float = 3e-3


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float]
    parameters: str  # digest of this rank's
    ledger: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    residual: float = 0.0
    step: int = 0


class Layer(nn.Module):
    """A feed-forward layer whose number of rows is not divisible by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 65)
        self.down = nn.Linear(65, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = self.down(torch.tanh(self.up(self.norm(values))))
        return values + changed


class Model(nn.Module):
    """Embedding, layers, an optional layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, extra: bool = True) -> Tensor:
        values = self.embedding(tokens)
        for layer in self.layers:
            values = layer(values)
        if extra:
            values = values + self.extra(values)
        logits: Tensor = self.head(self.norm(values))
        return logits


class OrderedReduceScatter:
    """Native, but summed in fp32 and rank order, like encoded sums: the oracle for four ranks."""

    def __new__(cls) -> Any:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        class Ordered(DefaultReduceScatter):
            def __call__(
                self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: Any = 0
            ) -> Any:
                rows = [torch.empty_like(input_tensor) for _ in range(group.size())]
                dist.all_gather(rows, input_tensor, group=group)
                mine = [row.view(group.size(), -1)[group.rank()].float() for row in rows]
                total = mine[0].clone()
                for row in mine[1:]:
                    total += row
                assert op == dist.ReduceOp.AVG
                output_tensor.copy_(total.div_(group.size()))

        return Ordered()


def build(job: Job) -> nn.Module:
    """Return the model under its engine; the same weights on all ranks."""
    torch.manual_seed(job.seed)
    device = default_device()
    model = Model().to(device)
    if job.engine == "ddp":
        if job.bf16:
            model.to(torch.bfloat16)
        return DistributedDataParallel(
            model, bucket_cap_mb=job.bucket_mb,
            find_unused_parameters=job.unused, static_graph=job.static_graph,
        )  # fmt: skip
    if job.replicas > 1:
        shape = (job.replicas, dist.get_world_size() // job.replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    reduce_dtype = getattr(torch, job.reduce_dtype) if job.reduce_dtype else None
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if job.bf16 else None, reduce_dtype=reduce_dtype
    )
    given: dict[str, Any] = {
        "mesh": mesh, "mp_policy": policy, "reshard_after_forward": job.reshard,
    }  # fmt: skip
    for layer in model.layers:
        fully_shard(layer, **given)
    if job.list_group:
        fully_shard([model.norm, model.head], **given)
    fully_shard(model, **given)
    modules: list[Any] = list(model.modules())
    if job.divide is not None:
        for module in modules:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(job.divide)
                module.set_force_sum_reduction_for_comms(True)
    if job.ordered:
        for module in modules:
            if hasattr(module, "set_custom_reduce_scatter"):
                module.set_custom_reduce_scatter(OrderedReduceScatter())
    return model


def train(job: Job, model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Run steps ``first`` to ``last``; return this rank's losses."""
    losses, device = [], default_device()
    for step in range(first, last):
        for number in range(job.micro_batches):
            seed = (job.seed * 1000 + step) * 100 + number * 10 + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator, device="cpu")
            tokens = tokens.to(device)
            labels = (tokens * 7 + 3) % VOCABULARY
            is_last = number == job.micro_batches - 1
            with syncing(job, model, is_last):
                logits = model(tokens, not (job.unused and step % 2))
                loss = nn.functional.cross_entropy(
                    logits.float().view(-1, VOCABULARY), labels.view(-1)
                )
                torch.autograd.backward(loss / job.micro_batches)
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def square_step(model: nn.Module, optimizer: Any, number: int, width: int) -> float:
    """Run a step of ``squares``; return its loss."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    loss: Tensor = model(torch.randn(4, width, generator=generator)).square().mean()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def squares(
    model: Any, block: dict[str, Any] | None, width: int
) -> tuple[list[float], str, Attached | None]:
    """Run three steps on inputs of ``width`` and the mean square of the outputs.

    Return the losses, the parameters' digest, and the attached parts if there is a block.
    """
    quiet = {"min_bytes": 0, "ledger": {"every": 1_000_000}}
    attached = None if block is None else hybridcomp.attach(model, {**quiet, **block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [square_step(model, optimizer, number, width) for number in range(3)]
    return losses, digest(model), attached


def syncing(job: Job, model: Any, is_last: bool) -> Any:
    """Skip the reduction of all micro-batches but the last, if the job says so."""
    if job.engine == "ddp":
        return contextlib.nullcontext() if is_last or not job.sync_last else model.no_sync()
    if job.sync_last:
        model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=job.lr, foreach=False)


def run(job: Job) -> Outcome:
    """Run a job from its first step to its last."""
    model = build(job)
    attached = None
    if job.block is not None:
        attached = hybridcomp.attach(model, {"ledger": {"every": 1_000_000}, **job.block})
    losses = train(job, model, optimizer_of(job, model), 0, job.steps)
    return outcome(losses, model, attached)


def run_all(jobs: list[Job]) -> list[Any]:
    """Run jobs one after the other; return an error in place of a failed job's result."""
    found: list[Any] = []
    for job in jobs:
        try:
            found.append(run(job))
        except ValueError as error:
            found.append(error)
    return found


def outcome(losses: list[float], model: nn.Module, attached: Attached | None) -> Outcome:
    found = Outcome(losses, digest(model))
    if attached is not None:
        for (dimension, _), entry in attached.channels.ledger.interval.items():
            if entry.messages:
                found.ledger[dimension] = (
                    entry.messages, entry.native, entry.raw_nbytes, entry.wire_nbytes,
                )  # fmt: skip
        found.residual = attached.channels.residuals.norm()
        found.step = attached.step
    return found


def digest(model: nn.Module) -> str:
    """SHA-256 of this rank's parameters."""
    found = hashlib.sha256()
    for tensor in tensors(model):
        found.update(tensor.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """Return this rank's shard of every parameter."""
    for parameter in model.parameters():
        local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
        yield parameter if local is None else local()


def sum_of_residuals(attached: Attached) -> dict[str, Tensor]:
    """Return by name the residuals' sum over all ranks, in units of the gradient."""
    divisors = attached.divisors()
    found: dict[str, Tensor] = {}
    for name, (offset, tensor) in held_in(attached.channels.residuals.state_dict()):
        short = name.removeprefix("between replicas: ")
        total = found.setdefault(short, torch.zeros(VOCABULARY * 100, device="cpu"))
        total[offset : offset + tensor.numel()] += tensor / divisors.get(name, 1.0)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    totals: dict[str, Tensor] = {}
    for of_rank in every:
        for name, tensor in of_rank.items():
            totals[name] = totals.get(name, torch.zeros_like(tensor)) + tensor
    return totals


def forget() -> None:
    """Detach everything."""
    steps.forget_all()
