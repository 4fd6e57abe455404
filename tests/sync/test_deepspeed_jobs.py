"""Islands as separate jobs under DeepSpeed: each stage, checkpoints, returns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs.words import DTYPES
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common import island_steps
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.sync.jobs import FED_BACK, beside, block, inside, rendezvous
from tests.sync.test_deepspeed import flat, meetings_of
from tests.training.trainer import Job, batch, make_engine


def steps(engine: Any, job: Job, first: int, numbers: range) -> None:
    """Take optimizer steps on the data of ranks from ``first`` on."""
    for step in numbers:
        values, targets = batch(first + dist.get_rank(), step, DTYPES[job.dtype])
        engine.backward((engine(values) - targets).float().square().mean())
        engine.step()


def weights_after(job: Job, first: int) -> torch.Tensor:
    """Train the islands of a job, or an island as a job, on the data of ranks from ``first`` on."""
    engine = make_engine(job)
    steps(engine, job, first, range(7))
    found = flat(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "dtype"),
    by_day([(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")], [(1, "bf16")]),
)
def test_jobs_train_as_parts_of_one_job(stage: int, dtype: str) -> None:
    whole = Job(stage=stage, dtype=dtype, block=inside(every=2, **FED_BACK))
    found = run_ranks(4, weights_after, whole, 0, timeout=600.0)
    with rendezvous() as address:
        job = Job(stage=stage, dtype=dtype, block=block(address, **FED_BACK))
        islands = beside(*((2, weights_after, (job, first)) for first in (0, 2)))
    assert all(torch.equal(a, b) for a, b in zip(found, [*islands[0], *islands[1]], strict=True))


def saves(job: Job, folder: Path) -> torch.Tensor:
    """Save between two meetings and continue."""
    first = 2 * int(folder.name)
    engine = make_engine(job)
    steps(engine, job, first, range(5))
    engine.save_checkpoint(str(folder), "five")
    steps(engine, job, first, range(5, 9))
    found = flat(engine)
    engine.destroy()
    return found


def loads(job: Job, folder: Path) -> tuple[torch.Tensor, int]:
    """Resume from the save; an island without a checkpoint takes the others' state."""
    first = 2 * int(folder.name)
    engine = make_engine(job)
    if folder.is_dir():
        engine.load_checkpoint(str(folder))
    steps(engine, job, first, range(5, 9))
    found, clock = flat(engine), meetings_of(engine).clock
    engine.destroy()
    return found, clock


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
def test_checkpoints_go_on_bit_for_bit_and_with_another_number(stage: int, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    with rendezvous() as address:
        job = Job(stage=stage, dtype="bf16", block=block(address, **FED_BACK))
        whole = beside(*((2, saves, (job, folder)) for folder in folders[:2]))
    with rendezvous() as address:  # another run
        job = Job(stage=stage, dtype="bf16", block=block(address, **FED_BACK))
        again = beside(*((2, loads, (job, folder)) for folder in folders[:2]))
    for island, other in zip(whole, again, strict=True):
        assert all(torch.equal(a, b) for a, (b, _) in zip(island, other, strict=True))
        assert [clock for _, clock in other] == [9, 9]
    with rendezvous() as address:  # and of three islands
        job = Job(stage=stage, dtype="bf16", block=block(address, at_start=3, **FED_BACK))
        three = beside(*((2, loads, (job, folder)) for folder in folders))
    assert [clock for island in three for _, clock in island] == [9] * 6


def test_an_engine_that_averages_over_a_part_of_the_job_is_no_island() -> None:
    config = CompressionConfig.parse(block("tcp://127.0.0.1:1"))
    session: Any = SimpleNamespace(channels=SimpleNamespace(config=config))
    words = r"found ranks \[0, 1\]; the island is the whole job, of 4 ranks; leave mpu out"
    with (
        mock.patch.object(dist, "get_world_size", lambda: 4),
        pytest.raises(ConfigError, match=words),
    ):
        island_steps.start(session, mock.Mock(), (0, 1), "leave mpu out")
