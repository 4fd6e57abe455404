"""megatron-core: tensor and pipeline ranks, overlapped gathers; names of Megatron's checkpoints."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridcomp.publishing import WeightReceiver
from hybridcomp.publishing.records import read_manifest
from tests.ranks import run_ranks
from tests.training.mcore_trainer import Job, run
from tests.training.trainer import digest

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
STEPS = 3
JOBS = [
    Job(bf16=True, steps=STEPS, lr=1e-3, distributed_optimizer=True, overlap=True),
    Job(bf16=True, steps=STEPS, lr=1e-3, tp=2),
    Job(bf16=True, steps=STEPS, lr=1e-3, pp=2, distributed_optimizer=True),
]  # fmt: skip
#: norms that Megatron's checkpoints name after the layer behind them
FUSED = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


def candidates(whole: Tensor, rank: int) -> set[str]:
    """Digests of what a rank may hold of a parameter: all of it, or half of its rows or columns."""
    halves = [
        whole.chunk(2, dim)[rank] for dim in range(min(2, whole.dim())) if whole.shape[dim] > 1
    ]
    return {digest(part) for part in (whole, *halves)}


def test_versions_are_what_the_ranks_hold(tmp_path: Path) -> None:
    jobs = JOBS if NIGHTLY else JOBS[:2]
    blocks = [{"publish": {"to": str(tmp_path / str(n))}} for n in range(len(jobs))]
    published = [replace(job, block=block) for job, block in zip(jobs, blocks, strict=True)]
    outcomes = run_ranks(2, run, [*jobs, *published], timeout=600.0)
    for number, job in enumerate(jobs):
        receiver = WeightReceiver(tmp_path / str(number))
        applied = receiver.update()
        assert applied is not None and applied.version == STEPS
        found = dict(receiver.tensors())
        assert {value.dtype for value in found.values()} == {torch.bfloat16}
        seen = set()
        for rank, ranks in enumerate(outcomes):
            native, own = ranks[number], ranks[len(jobs) + number]
            assert not isinstance(native, str) and not isinstance(own, str), (native, own)
            assert own.losses == native.losses and own.parameters == native.parameters
            for name, held in own.parameters.items():
                name = name.removeprefix("0.module.")
                for here, there in FUSED:
                    name = name.replace(here, there)
                if job.pp == 2:  # one layer on each stage
                    name = name.replace("layers.0.", f"layers.{rank}.")
                seen.add(name)
                assert held in candidates(found[name], rank if job.tp == 2 else 0), name
        assert seen == set(found)
        last = read_manifest((tmp_path / str(number) / f"v{STEPS:010d}.json").read_bytes(), "")
        assert not last.full and last.weights == sum(value.numel() for value in found.values())
