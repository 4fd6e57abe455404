"""Islands that are jobs of their own under DDP: as parts of one job; ended, hung, come, bad."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridcomp
from hybridcomp.errors import AgreementError
from tests.ranks import run_ranks
from tests.sync.jobs import beside, block, rendezvous, start
from tests.sync.torch_job import Job

FED_BACK: dict[str, Any] = {
    "preset": "diloco", "codec": "blockint", "bits": 4, "error_feedback": True,
}  # fmt: skip


#: the weights that all agreed on, by meeting
Starts = dict[int, Tensor]


def parts(steps: int, engine: str) -> Tensor:
    """Train two islands of two ranks as parts of a job."""
    sync = {"islands": 2, "every": 2, **FED_BACK}
    job = Job({"sync": sync, "min_bytes": 0, "ledger": {"every": 1_000_000}}, engine).build()
    return job.train(steps).weights()


def one_of_two(address: str, first: int, steps: int, engine: str) -> Tensor:
    """Train an island of two ranks as a job; with other weights, all but the first in the store."""
    job = Job(block(address, **FED_BACK), engine, first=first).build().train(steps)
    weights = job.weights()
    hybridcomp.detach(job.model)
    return weights


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_jobs_train_as_parts_of_one_job(engine: str) -> None:
    whole = run_ranks(4, parts, 7, engine)
    with rendezvous() as address:
        found = beside(*((2, one_of_two, (address, first, 7, engine)) for first in (0, 2)))
    assert all(torch.equal(a, b) for a, b in zip(whole, [*found[0], *found[1]], strict=True))


def lives(address: str, number: int, until: str, fate: str = "", when: int = 0) -> Starts:
    """Train an island of one rank until ``until`` has been at 5 meetings.

    Returns the start copy after each meeting. ``fate``: what befalls it after meeting ``when``.
    """
    where = block(address, 4.0, 3, **FED_BACK)
    where["sync"]["islands"]["name"] = f"i{number}"
    job = Job(where, first=number, seed=number).build()
    found: Starts = {}
    last, seen = -1, 0
    while seen < 5:
        job.train(1)
        of = job.job_meetings
        if of.membership.last.number != last:
            last = of.membership.last.number
            seen += until in of.membership.last.present
            found[last] = of.part.fragment.start.clone()
            if fate and last == when:
                befall(fate, job)
                fate = ""
    row = of.row()
    assert row is not None and row["islands"] == 3
    hybridcomp.detach(job.model)
    return found


def befall(fate: str, job: Job) -> None:
    """End this process, let it hang for longer than the others wait, or spoil its weights."""
    if fate == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "hangs":
        time.sleep(6.0)
    else:
        with torch.no_grad():
            next(iter(job.model.parameters())).fill_(torch.nan)


def alike(*islands: Starts) -> int:
    """Return how many meetings all have in common; they have the same bits after each."""
    first, *others = islands
    shared = [number for number in first if all(number in other for other in others)]
    for number in shared:
        assert all(torch.equal(first[number], other[number]) for other in others), number
    return len(shared)


def test_one_ends_and_comes_back_and_one_sends_nan() -> None:
    with rendezvous() as address, ThreadPoolExecutor(4) as pool:
        one = start(pool, 1, lives, address, 0, "i2#2")
        two = start(pool, 1, lives, address, 1, "i2#2", "nan", 1)
        three = start(pool, 1, lives, address, 2, "i2#2", "ends", 3)
        with pytest.raises(AssertionError, match="died without a word"):
            three.result()
        again = start(pool, 1, lives, address, 2, "i2#2")
        (first,), (second,), (third,) = one.result(), two.result(), again.result()
    assert first.keys() == second.keys() == set(range(max(first) + 1))  # no meeting was lost
    assert alike(first, second) == len(first) and alike(first, second, third) == len(third) > 5
    assert all(bool(weights.isfinite().all()) for weights in first.values())


@pytest.mark.nightly
def test_one_hangs_and_comes_back() -> None:
    with rendezvous() as address, ThreadPoolExecutor(3) as pool:
        one = start(pool, 1, lives, address, 0, "i1#2")
        two = start(pool, 1, lives, address, 1, "i1#2", "hangs", 2)
        three = start(pool, 1, lives, address, 2, "i1#2")
        (first,), (second,), (third,) = one.result(), two.result(), three.result()
    assert first.keys() == third.keys() and alike(first, third) == len(first)
    assert 3 not in second and alike(first, second) == len(second) > 5


def overflowing(address: str, number: int) -> tuple[Tensor, dict[str, float]]:
    """Train with a loss scaler, which skips a step of the first island."""
    job = Job(block(address, **FED_BACK), first=number).build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(4):
        loss = job.model(torch.arange(4)[None] + number).square().mean()
        scaler.scale(loss * torch.inf if step == 1 and not number else loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        assert job.job_meetings.clock == step + 1
    row, weights = job.job_meetings.row(), job.weights()
    assert row is not None
    hybridcomp.detach(job.model)
    return weights, row


def test_an_overflow_in_one_moves_no_meeting() -> None:
    with rendezvous() as address:
        (one,), (two,) = beside(*((1, overflowing, (address, number)) for number in range(2)))
    assert torch.equal(one[0], two[0]) and bool(one[0].isfinite().all())
    for row in (one[1], two[1]):
        assert (row["meetings"], row["skipped"], row["left_out"], row["islands"]) == (2, 0, 0, 2)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "H": ({"every": 3}, r"^compression.sync.every: island x has 3, and the run .* with 2; start"),
    "codec": ({"bits": 3}, r"^compression.sync.codec: island x has 'blockint.bits=3.'"),
    "outer": ({"outer": {"lr": 0.5}}, r"^compression.sync.lr: island x has 0.5"),
}


def refused(address: str) -> None:
    """Begin a run of one island, which others cannot join."""

    def made(**sync: Any) -> Job:
        where = block(address, 8.0, 1, **{**FED_BACK, **sync})
        where["sync"]["islands"]["name"] = "x" if sync else "first"
        return Job(where).build()

    job = made().train(4)
    assert job.job_meetings.membership.last.number == 2
    for sync, words in BAD.values():
        with pytest.raises(AgreementError, match=words) as error:
            made(**sync).train(1)
        assert "\n" not in str(error.value)
    wider = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert hybridcomp.attach(wider, block(address, 8.0, 1, **FED_BACK)) is not None
    with pytest.raises(AgreementError, match=r"^trained weights: island 0 has 6, and"):
        wider(torch.ones(1, 2))
    job.train(2)
    assert job.job_meetings.membership.last.number == 3


def narrower(address: str) -> None:
    job = Job(block(address, 8.0, 1, **FED_BACK)).build()
    with pytest.raises(AgreementError, match=r"^ranks of an island: island .* has 2, and"):
        job.train(1)


def test_what_does_not_fit_is_named_in_one_line() -> None:
    with rendezvous() as address:
        run_ranks(1, refused, address)
        run_ranks(2, narrower, address)
