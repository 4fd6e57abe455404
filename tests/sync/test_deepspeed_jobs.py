"""Islands as separate jobs under DeepSpeed: each stage, checkpoints, returns."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs.words import DTYPES
from hybridcomp.errors import CheckpointError
from hybridcomp.session.engine_session import session_of
from hybridcomp.sync import JobMeetings
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.sync.jobs import beside, block, rendezvous, start
from tests.sync.test_deepspeed import flat
from tests.training.trainer import Job, batch, make_engine

FED_BACK: dict[str, Any] = {
    "preset": "diloco", "codec": "blockint", "bits": 4, "error_feedback": True,
}  # fmt: skip


def steps(engine: Any, job: Job, first: int, numbers: range) -> None:
    """Take optimizer steps on the data of ranks from ``first`` on."""
    for step in numbers:
        values, targets = batch(first + dist.get_rank(), step, DTYPES[job.dtype])
        engine.backward((engine(values) - targets).float().square().mean())
        engine.step()


def meetings_of(engine: Any) -> JobMeetings:
    session = session_of(engine)
    assert session is not None
    (found,) = session.followers.stateful
    assert isinstance(found, JobMeetings)
    return found


def parts(job: Job) -> torch.Tensor:
    """Train two islands of two ranks as parts of a job."""
    engine = make_engine(job)
    steps(engine, job, 0, range(7))
    found = flat(engine)
    engine.destroy()
    return found


def one_of_two(job: Job, first: int) -> torch.Tensor:
    """Train one of these islands as a separate job."""
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
    sync = {"islands": 2, "every": 2, **FED_BACK}
    whole = {"sync": sync, "min_bytes": 0, "ledger": {"every": 1_000_000}}
    found = run_ranks(4, parts, Job(stage=stage, dtype=dtype, block=whole), timeout=600.0)
    with rendezvous() as address:
        job = Job(stage=stage, dtype=dtype, block=block(address, **FED_BACK))
        islands = beside(*((2, one_of_two, (job, first)) for first in (0, 2)))
    assert all(torch.equal(a, b) for a, b in zip(found, [*islands[0], *islands[1]], strict=True))


def until(job: Job, number: int, name: str, ends: bool) -> dict[int, torch.Tensor]:
    """Train until island ``name`` has been at 3 meetings; return the start copies by meeting."""
    engine = make_engine(job)
    found: dict[int, torch.Tensor] = {}
    step = last = seen = 0
    while seen < 3:
        steps(engine, job, 2 * number, range(step, step + 1))
        step, of = step + 1, meetings_of(engine)
        if of.membership.last.number != last:
            last = of.membership.last.number
            seen += name in of.membership.last.present
            found[last] = of.parts[0].fragment.start.clone()
            if ends and last == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    engine.destroy()
    return found


def named(address: str, name: str, at_start: int = 2) -> dict[str, Any]:
    where = block(address, 6.0, at_start, **FED_BACK)
    where["sync"]["islands"]["name"] = name
    return where


def test_an_island_of_two_ranks_ends_and_comes_back() -> None:
    with rendezvous() as address, ThreadPoolExecutor(3) as pool:
        jobs = [Job(stage=1, dtype="bf16", block=named(address, name)) for name in "ab"]
        one = start(pool, 2, until, jobs[0], 0, "b#2", False)
        two = start(pool, 2, until, jobs[1], 1, "b#2", True)
        with pytest.raises(AssertionError, match="died without a word"):
            two.result()
        again = start(pool, 2, until, jobs[1], 1, "b#2", False)
        first, third = one.result(), again.result()
    for mine, theirs in zip(first, third, strict=True):
        shared = mine.keys() & theirs.keys()
        assert len(shared) >= 3 and all(torch.equal(mine[n], theirs[n]) for n in shared)


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


def saves_into(job: Job, folder: Path, first: int) -> str:
    """Save where both islands save; return the error."""
    engine = make_engine(job)
    steps(engine, job, first, range(2))
    told = ""
    try:
        engine.save_checkpoint(str(folder), "two")
    except CheckpointError as error:
        told = str(error)
    engine.destroy()
    return told


def test_islands_do_not_save_into_one_folder(tmp_path: Path) -> None:
    with rendezvous() as address:
        jobs = [Job(stage=1, block=named(address, name, at_start=1)) for name in "ab"]
        assert run_ranks(1, saves_into, jobs[0], tmp_path, 0) == [""]
        (told,) = run_ranks(1, saves_into, jobs[1], tmp_path, 1)  # an island of the same run
    words = r"two has what island a of this run has saved, and island b would overwrite"
    assert re.search(words, told) and "\n" not in told
    with rendezvous() as address:  # another run may
        job = Job(stage=1, block=block(address, at_start=1, **FED_BACK))
        assert run_ranks(1, saves_into, job, tmp_path, 0) == [""]


@pytest.mark.parametrize("stage", by_day(range(4), [2]))
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
