"""One segment of a megatron-core job: resume, train, save; what its ranks have seen."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import hybridcomp
from hybridcomp.session import process
from tests.elastic.jobs import LENGTH as SAMPLES
from tests.elastic.jobs import MOST, Case, Segment, batches, mean
from tests.training import mcore_trainer
from tests.training.mcore_trainer import LENGTH, VOCAB, Job
from tests.training.test_checkpoint import sums

#: layouts of the distributed optimizer's states, by engine
SHARDING = {"megatron-sharded": "fully_reshardable", "megatron-buckets": "dp_reshardable"}


class Sequences(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Sequences by number, that count modulo VOCAB with some noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(VOCAB, (1,), generator=generator)
        noise = torch.randint(2, (LENGTH + 1,), generator=generator)
        return index, (start + 2 * torch.arange(LENGTH + 1) + noise) % VOCAB


def job_of(case: Case) -> Job:
    return Job(
        layers=1, distributed_optimizer=case.engine in SHARDING, lr=1e-3, clip=0.0,
        bf16=case.dtype == "bf16", loss_scale=256.0 if case.dtype == "fp16" else None,
        block=case.block,
    )  # fmt: skip


def segment(case: Case, place: Path, steps: int, save: bool) -> Segment:
    mcore_trainer.prepare()
    job = job_of(case)
    with mcore_trainer.armed(job):
        mcore_trainer.initialize(job)
        chunks, optimizer = mcore_trainer.build(job)
        sampler = hybridcomp.ElasticSampler(SAMPLES, case.samples, tail="keep")
        where = hybridcomp.resume(chunks, place, optimizer=optimizer, sampler=sampler)
        channels = process.current()
        assert channels is not None
        assert channels.step == where.step == sampler.steps
        seen = Segment(before=sums(channels.residuals.state_dict()))
        seen.resumed = (where.step, where.samples_seen, where.ranks)
        micro, accumulation = sampler.micro_batches(MOST)
        loader = batches(Sequences(), sampler, micro)
        while sampler.steps < steps:
            micros = [next(loader) for _ in range(accumulation)]
            loss = step_of(micros, chunks, optimizer, micro)
            sampler.stepped()
            seen.samples.append([i for indices, _ in micros for i in indices.tolist()])
            seen.losses.append(mean(loss))
        seen.after = sums(channels.residuals.state_dict())
        if save:
            write(case, place / f"iter_{steps:07d}", chunks, optimizer, sampler)
    return seen


def step_of(micros: list[Any], chunks: list[Any], optimizer: Any, micro: int) -> float:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=mcore_trainer.forward_step,
        data_iterator=iter([tokens for _, tokens in micros]),
        model=chunks[0],
        num_microbatches=len(micros),
        seq_length=LENGTH,
        micro_batch_size=micro,
        forward_only=False,
    )
    success, _, _ = optimizer.step()
    assert success
    return sum(float(part["loss"]) for part in found) / len(found)


def write(case: Case, folder: Path, chunks: list[Any], optimizer: Any, sampler: Any) -> None:
    """Save as docs/elastic.md says."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    kind = SHARDING.get(case.engine)
    metadata = {} if kind is None else {"distrib_optim_sharding_type": kind}
    model = chunks[0].module  # without Megatron's wrappers
    weights = getattr(model, "module", model).sharded_state_dict(metadata=metadata)
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
        "sampler": sampler.state_dict(),
        "iteration": sampler.steps,
    }
    # Megatron writes with processes of its own, which the daemonic ranks of a pool may not have
    with patch.dict(mp.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    hybridcomp.save_state(folder)
