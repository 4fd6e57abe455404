"""Ranks over NCCL: results of collectives, two levels, disagreeing ranks, a dying rank."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

from hybridcomp.codecs import VALUE_DTYPES, make_codec
from hybridcomp.errors import HybridcompError
from tests.kernels.cuda.test_gpu import _gathered_on, _reduced_on
from tests.nccl.common import DEVICE, EIGHT_BITS, FEEDBACK, MARKS, Trainings, block, tail, trainings
from tests.nccl.pool import NcclPool
from tests.patches.ds.test_two_levels import JOBS as LEVEL_JOBS
from tests.training.trainer import Job, make_engine, run, train, train_step

pytestmark = MARKS

LEVELS = {"dp": FEEDBACK, "zero": EIGHT_BITS, "min_bytes": 0, "hierarchy": "auto"}


def assert_as_on_a_cpu(ranks: int, calls: list[tuple[Any, ...]]) -> None:
    """Check that functions give the same tensors on NCCL as on CPUs over gloo."""
    with NcclPool(ranks, device="cpu") as cpus, NcclPool(ranks, device=DEVICE) as shared:
        for function, *rest in calls:
            expected = cpus.run(function, "cpu", *rest, timeout=240)
            found = shared.run(function, DEVICE, *rest, timeout=240)
            for right, wrong in zip(expected, found, strict=True):
                for left, other in zip(right, wrong, strict=True):
                    assert torch.equal(left, other), (function.__name__, rest)


def test_sums_are_those_of_a_cpu() -> None:
    """Includes error feedback, cuts and sizes that stay on the device."""
    codecs = make_codec("blockint", bits=4), make_codec("radix")
    assert_as_on_a_cpu(
        3, [(_reduced_on, dtype, codec) for codec in codecs for dtype in VALUE_DTYPES]
    )


def test_moves_are_those_of_a_cpu() -> None:
    """Gathers, exchanges and sends of a variable-size codec."""
    assert_as_on_a_cpu(2, [(_gathered_on,)])


nodes = trainings(run, 4, per_node=2)


@pytest.mark.parametrize("name", LEVEL_JOBS)
def test_two_nodes_of_two_ranks(nodes: Trainings, name: str) -> None:
    """The launcher sets the node of each rank; half of the bytes of one level cross nodes."""
    job = replace(LEVEL_JOBS[name], dtype="bf16")
    settings = {k: v for k, v in LEVELS.items() if job.stage or k != "zero"}
    base, found = nodes.both(job, settings)
    flat = nodes(replace(job, block={**settings, "hierarchy": 1}))  # every rank is a node
    assert tail(found) == pytest.approx(tail(base), rel=0.05)
    assert all(one.digests == found[0].digests for one in found)
    for dimension in ("dp", "zero") if job.stage else ("dp",):
        levels, one_level = (
            sum(one.between[dimension][1] for one in ranks) for ranks in (found, flat)
        )
        assert 0 < levels < 0.67 * one_level, (dimension, levels, one_level)


def _engine_of(blocks: list[dict[str, Any]]) -> str:
    """Return the error of a rank whose block differs from the others'."""
    try:
        train(Job(1, "bf16", steps=2, block=blocks[dist.get_rank()]))
    except HybridcompError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_with_different_blocks_are_named() -> None:
    blocks = [block("dp", EIGHT_BITS), block("dp", {**EIGHT_BITS, "bits": 4})]
    with NcclPool(2, device=DEVICE) as pool:
        for said in pool.run(_engine_of, blocks, timeout=90):
            assert "AgreementError" in said and "rank(s) 1 differ from rank 0" in said
            assert "dp" in said


def _until_killed(victim: int) -> None:
    """Train; ``victim`` exits silently in the middle of a step."""
    job = Job(1, "bf16", block={**block("dp", FEEDBACK), **block("zero", EIGHT_BITS)})
    engine = make_engine(job)
    for step in range(1000):
        if step == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(engine, job, step)


def test_the_others_notice_a_killed_rank() -> None:
    """NCCL reports it by itself, long before a timeout; the pool waits for all of them."""
    began = time.monotonic()
    with NcclPool(2, device=DEVICE) as pool, pytest.raises(AssertionError) as caught:
        pool.run(_until_killed, 1, timeout=100, grace=60)
    said = str(caught.value)
    assert "rank 1 of 2:\ndied without a word, exit code -9" in said
    assert "rank 0 of 2:" in said and "were still running" not in said, said
    assert any(word in said for word in ("NCCL", "Connection", "closed")), said
    assert time.monotonic() - began < 100
