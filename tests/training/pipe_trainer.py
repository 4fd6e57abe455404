"""Tiny pipeline trainings on several ranks, for tests of the pipeline seams.

Call ``run(jobs)`` on every rank (``tests.ranks.run_ranks``) with many jobs: importing DeepSpeed
takes longer than all trainings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.utils.checkpoint
from packaging.version import Version
from torch import Tensor, nn

from tests.training.in_turn import digest, in_turn, ledger_of

VOCAB, WIDTH, LENGTH, MICRO_BATCH = 64, 32, 16, 2
LAYERS = 3


@dataclass(frozen=True)
class Job:
    """One training. ``block`` is the compression block, None runs unpatched."""

    stages: int = 2
    steps: int = 50
    micro_batches: int = 2
    bf16: bool = False
    zero: int = 0
    tied: bool = False
    masks: bool = False
    checkpoint: bool = False
    dynamic: bool = False
    evaluate: bool = False  # eval_batch before the first step and after the last
    nan_step: int = -1  # this step's first activation holds a NaN
    model_parallel: int = 1
    block: dict[str, Any] | None = None


@dataclass
class Outcome:
    """A rank's results."""

    losses: list[float]
    evaluations: list[float]
    parameters: dict[str, str]  # digest of the bytes, by name
    tied: str  # digest of the tied weight, "" without
    masks: list[str]  # digests of (additive, bool) masks at the first or last stage
    messages: list[tuple[str, str, int, int, int]]  # dimension, direction, messages, raw, wire


class Embed(nn.Module):
    """Map ids to hidden states; with masks (ids, bool mask) to (hidden, additive, bool mask)."""

    def __init__(self, job: Job, seen: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) / math.sqrt(WIDTH))
        self.job, self.seen, self.calls = job, seen, 0

    def forward(self, inputs: Any) -> Any:
        if not self.job.masks:
            return self._hidden(inputs)
        ids, keep = inputs
        hidden = self._hidden(ids)
        additive = torch.zeros(keep.shape).masked_fill(~keep, -math.inf).to(hidden.dtype)
        additive = additive.unsqueeze(1).repeat(1, keep.shape[1], 1)
        if torch.is_grad_enabled():
            self.seen.append(digest(additive) + digest(keep))
            additive.requires_grad_()  # upstream calls backward on every floating-point tensor
        return hidden, additive, keep

    def _hidden(self, ids: Tensor) -> Tensor:
        hidden = nn.functional.embedding(ids, self.weight)
        if self.training:
            step, self.calls = self.calls // self.job.micro_batches, self.calls + 1
            if step == self.job.nan_step:
                spoiled = torch.zeros_like(hidden)
                spoiled[0, 0, 0] = math.nan
                hidden = hidden + spoiled
        return hidden


class Block(nn.Module):
    """Single-head attention, enough for a mask to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: Any) -> Any:
        found = inputs[0] if isinstance(inputs[0], tuple) else inputs
        hidden, *masks = found
        normed = self.norm(hidden)
        scores = normed @ normed.transpose(1, 2) / math.sqrt(WIDTH)
        if masks:
            scores = scores + masks[0]
        hidden = hidden + nn.functional.gelu(self.mix(scores.softmax(-1) @ normed))
        return (hidden, *masks) if masks else hidden


class Probe(nn.Module):
    """Records the masks received by the last stage, and drops them."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, Tensor):
            return inputs
        hidden, additive, keep = inputs
        if torch.is_grad_enabled():
            self.seen.append(digest(additive) + digest(keep))
        # an additive mask needs a gradient, or upstream's assertion fails
        merged: Tensor = hidden + 0.0 * additive.masked_fill(~keep.unsqueeze(1), 0.0).sum()
        return merged


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.out(hidden)
        return found


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().reshape(-1, VOCAB), labels.reshape(-1))


def _tied_head(embed: Embed, hidden: Tensor) -> Tensor:
    logits: Tensor = hidden @ embed.weight.T
    return logits


def build(job: Job, seen: list[str]) -> Any:
    """Return the PipelineModule."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    first: Any = LayerSpec(Embed, job, seen)
    last: Any = LayerSpec(Head)
    if job.tied:
        first = TiedLayerSpec("embed", Embed, job, seen, tied_weight_attr="weight")
        last = TiedLayerSpec(
            "embed", Embed, job, seen, forward_fn=_tied_head, tied_weight_attr="weight"
        )
    layers = [first, *(LayerSpec(Block) for _ in range(LAYERS)), LayerSpec(Probe, seen), last]
    shape: dict[str, Any] = {"num_stages": job.stages}
    if job.model_parallel > 1:
        topology = PipeModelDataParallelTopology(job.stages, job.model_parallel, 1)
        shape = {"topology": topology}
    if job.checkpoint and Version(version("deepspeed")) < Version("0.19.8"):
        # its checkpoints need a stream, which its CPU accelerator lacks
        shape["activation_checkpoint_func"] = partial(
            torch.utils.checkpoint.checkpoint, use_reentrant=True
        )
    return PipelineModule(
        layers,
        loss_fn=_loss,
        partition_method="uniform",
        activation_checkpoint_interval=1 if job.checkpoint else 0,
        checkpointable_layers=["Block"],  # ids require no grad, which the checkpoint of Embed needs
        dynamic_shape=job.dynamic,
        **shape,
    )


def batches(job: Job, replica: int) -> Iterator[Any]:
    """Return learnable sequences: each token follows from the previous one."""
    step = 0
    while True:
        generator = torch.Generator().manual_seed(1000 * replica + step)
        # with dynamic shapes every second batch is shorter
        length = LENGTH // 2 if job.dynamic and (step // job.micro_batches) % 2 else LENGTH
        start = torch.randint(VOCAB, (MICRO_BATCH, 1), generator=generator)
        ids = (start + 7 * torch.arange(length + 1)) % VOCAB
        inputs: Any = ids[:, :-1].contiguous()
        if job.masks:
            ends = torch.randint(length // 2, length + 1, (MICRO_BATCH, 1), generator=generator)
            inputs = (inputs, torch.arange(length).expand(MICRO_BATCH, -1) < ends)
        yield inputs, ids[:, 1:].contiguous()
        step += 1


def ds_config(job: Job, data_parallel: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": job.micro_batches,
        "train_batch_size": MICRO_BATCH * job.micro_batches * data_parallel,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": job.zero},
        "steps_per_print": 10**9,
    }
    if job.bf16:
        config["bf16"] = {"enabled": True}
    if job.block is not None:
        config["compression"] = job.block
    return config


def run(jobs: Sequence[Job]) -> list[Outcome]:
    """Run every job in turn; revert all patches for unpatched jobs."""
    return in_turn(jobs, train, lambda job: job.block is None)


def train(job: Job) -> Outcome:
    """Train on this rank."""
    import deepspeed
    import torch.distributed as dist

    torch.manual_seed(0)
    seen: list[str] = []
    data_parallel = dist.get_world_size() // job.stages // job.model_parallel
    engine, *_ = deepspeed.initialize(model=build(job, seen), config=ds_config(job, data_parallel))
    engine.has_bool_tensors = job.masks
    replica = engine.grid.get_data_parallel_id()
    data = batches(job, replica)
    evaluations = []
    if job.evaluate:
        evaluations.append(float(engine.eval_batch(batches(job, 99))))
    losses = [float(engine.train_batch(data)) for _ in range(job.steps)]
    if job.evaluate:
        evaluations.append(float(engine.eval_batch(batches(job, 99))))
    parameters = {name: digest(p) for name, p in engine.module.named_parameters()}
    tied = next((d for name, d in parameters.items() if name.startswith("tied_modules")), "")
    found = Outcome(losses, evaluations, parameters, tied, seen, messages(engine))
    engine.destroy()
    return found


def messages(engine: Any) -> list[tuple[str, str, int, int, int]]:
    """Return this rank's ledger without times."""
    from hybridcomp.channels import channels_of

    rows = ledger_of(channels_of(engine)).items()
    return [(*key, messages, raw, wire) for key, (messages, _, raw, wire) in rows]
