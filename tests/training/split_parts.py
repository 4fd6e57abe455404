"""Parts of sharded layers on several ranks, for tests of the AutoTP and Ulysses seams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.in_turn import digest, start_deepspeed
from tests.training.split_trainer import (
    BATCH,
    LENGTH,
    VOCAB,
    WIDTH,
    Job,
    Local,
    Model,
    Outcome,
    batch,
    ds_config,
    make_engine,
    run,
)


def run_beside(job: Job) -> tuple[int, list[float]]:
    """Train without a block beside an engine with a block; return its messages, and our losses."""
    import deepspeed

    import hybridcomp
    from hybridcomp.channels import channels_of

    start_deepspeed()
    engine = make_engine(job)
    torch.manual_seed(0)
    model = Model(job)
    other, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=ds_config(replace(job, block=None)),
        mpu=engine.mpu if job.sp > 1 else None,
    )
    losses = []
    for step in range(job.steps):
        loss = other(*batch(job, step, 0))
        other.backward(loss)
        other.step()
        losses.append(loss.item())
    channels = channels_of(engine)
    assert channels is not None
    messages = sum(int(entry.messages) for entry in channels.ledger.interval.values())
    for one in (other, engine):
        one.destroy()
    hybridcomp.uninstall()
    return messages, losses


def run_files(job: Job, files: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Train with complete ds_configs, except for the batch size."""
    sizes = {"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10_000}
    return run([replace(job, ds_json={**file, **sizes}) for file in files])


def gather(job: Job) -> tuple[Tensor, list[Tensor], int]:
    """Return a sharded weight as a checkpoint gathers it, its shards, and the count of ``tp``."""
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    import hybridcomp
    from hybridcomp.channels import channels_of

    start_deepspeed()
    engine = make_engine(job)
    channels = channels_of(engine)
    assert channels is not None
    layer = engine.module.layers[0].mlp.up_proj
    shard = layer.weight.detach().clone()
    shards = [torch.empty_like(shard) for _ in range(job.tp)]
    dist.all_gather(shards, shard)
    with GatherReplacedLayerParams([layer.weight], layer, enabled=True):
        whole = layer.weight.detach().clone()
    sent = sum(int(entry.messages) for entry in channels.ledger.interval.values())
    engine.destroy()
    hybridcomp.uninstall()
    return whole, shards, sent


def head(block: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Run a row-parallel head: sum, layer in training and inference; return messages of ``tp``."""
    from deepspeed.module_inject import layers

    from hybridcomp.channels import ATTRIBUTE, Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.patches.ds.layers import autotp
    from hybridcomp.seams.patching import Patch, apply_all, revert_all

    start_deepspeed()
    channels = Channels(CompressionConfig.parse(block))
    torch.manual_seed(0)
    layer = layers.LmHeadLinearAllreduce(nn.Linear(WIDTH, VOCAB, bias=False), dist.group.WORLD)
    setattr(layer, ATTRIBUTE, channels)
    values = torch.randn(BATCH, LENGTH, WIDTH)
    mine = values.chunk(2, dim=-1)[dist.get_rank()]
    exact = mine @ layer.weight.t()
    dist.all_reduce(exact)
    applied = apply_all(Patch(seam, make) for seam, make in autotp.PATCHES)
    found = []
    try:
        for training in (True, False):
            layers.set_autotp_mode(training=training)
            with torch.no_grad():
                found.append(layer(values))
    finally:
        layers.set_autotp_mode(training=False)
        revert_all(applied)
    counted = sum(int(entry.messages) for entry in channels.ledger.interval.values())
    return exact.detach(), found[0], found[1], counted


class Stream:
    """CPU stream: everything happens at once."""

    def wait_stream(self, other: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""


def overlapped(block: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], bool, dict[str, int]]:
    """Run overlapped Ulysses unpatched and patched; return outputs, handles, messages."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.sequence.layer import DistributedAttention

    from hybridcomp.channels import ATTRIBUTE, Channels
    from hybridcomp.collectives import Handle
    from hybridcomp.config import CompressionConfig
    from hybridcomp.patches.ds.layers import ulysses
    from hybridcomp.seams.patching import Patch, apply_all, revert_all

    start_deepspeed()
    channels = Channels(CompressionConfig.parse(block))
    stream, kind = Stream(), type(get_accelerator())
    shape = (BATCH, LENGTH // 2, 4, 8)
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = [torch.randn(shape, generator=generator) for _ in range(3)]
    weights = torch.randn(shape, generator=generator)

    def both_ways() -> tuple[list[Tensor], Any]:
        layer = DistributedAttention(
            Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1, sp_stream=stream
        )
        setattr(layer, ATTRIBUTE, channels)
        leaves = [part.clone().requires_grad_() for part in values]
        # upstream's hooks are on a projection's output
        out = layer(*(leaf * 1.0 for leaf in leaves), 0)
        (out * weights).sum().backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [out.detach(), *grads], layer.overlap_handles["dq_work"]

    with (
        mock.patch.object(kind, "default_stream", lambda self, index=None: stream),
        mock.patch.object(kind, "current_stream", lambda self, index=None: stream),
    ):
        native, _ = both_ways()
        applied = apply_all(Patch(seam, make) for seam, make in ulysses.PATCHES)
        try:
            ours, handle = both_ways()
        finally:
            revert_all(applied)
    ledger = {str(way): int(entry.messages) for (_, way), entry in channels.ledger.interval.items()
              if entry.messages}  # fmt: skip
    return native, ours, isinstance(handle, Handle), ledger


def compiled(block: dict[str, Any]) -> tuple[bool, dict[str, tuple[int, int]]]:
    """Run ALST's exchange eager and compiled; return whether they agree, and messages of each."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    from hybridcomp.channels import Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.patches.ds.layers import ulysses
    from hybridcomp.seams.patching import Patch, apply_all, revert_all
    from hybridcomp.session import process

    start_deepspeed()
    channels = Channels(CompressionConfig.parse(block))
    values = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def exchange(leaf: Tensor) -> Tensor:
        whole: Tensor = ulysses_sp._dim_zero_all_to_all(dist.group.WORLD, leaf * 2.0)
        return whole.square().sum()

    found = []
    applied = apply_all(Patch(seam, make) for seam, make in ulysses.PATCHES)
    process.use(channels)
    try:
        ulysses_sp.register_all_to_all_group(dist.group.WORLD)
        for function in (exchange, torch.compile(exchange, backend="aot_eager", fullgraph=True)):
            leaf = values.clone().requires_grad_()
            loss: Any = function(leaf)
            loss.backward()
            assert leaf.grad is not None
            found.append((loss.item(), digest(leaf.grad)))
    finally:
        process.configure(None)
        revert_all(applied)
    entries = channels.ledger.interval.items()
    ledger = {str(way): (int(e.messages), int(e.native)) for (_, way), e in entries if e.messages}
    return found[0] == found[1], ledger
