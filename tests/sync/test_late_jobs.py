"""Islands as jobs, also with alternating fragments and late means: join, end, resume, leave."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridcomp
from hybridcomp.config import CompressionConfig
from tests.publishing.made import NIGHTLY
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.sync.jobs import FED_BACK, beside, block, inside, rendezvous, start
from tests.sync.test_jobs import alike, lives
from tests.sync.torch_job import Job

CODED: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
RULES: dict[str, dict[str, Any]] = {
    "at once": FED_BACK,
    "in turn": {"preset": "diloco", **CODED, "every": 4, "fragments": 4},
    "streaming": {"preset": "streaming", "every": 8, "delay": 5},  # two meetings in flight
    "wsp": {"preset": "wsp", "every": 2},
    "far ahead": {"preset": "wsp", **CODED, "every": 3, "fragments": 2, "staleness": 2},
}
STEPS = 19
#: of trainings that are compared with islands in one job
PART_STEPS = 19 if NIGHTLY else 11


def parts(rule: str, engine: str) -> Tensor:
    """Train two islands of two ranks as parts of a job."""
    job = Job(inside(**{"every": 2, **RULES[rule]}), engine).build()
    return job.train(PART_STEPS).weights()


def one_of_two(address: str, first: int, rule: str, engine: str) -> Tensor:
    job = Job(block(address, **RULES[rule]), engine, first=first).build()
    weights = job.train(PART_STEPS).weights()
    hybridcomp.detach(job.model)
    return weights


@pytest.mark.parametrize(
    ("rule", "engine"),
    by_day(
        [(rule, engine) for rule in RULES for engine in ("ddp", "fsdp2")],
        [("streaming", "fsdp2")],
    ),
)
def test_jobs_train_as_parts_of_one_job(rule: str, engine: str) -> None:
    whole = run_ranks(4, parts, rule, engine)
    with rendezvous() as address:
        found = beside(*((2, one_of_two, (address, first, rule, engine)) for first in (0, 2)))
    assert all(torch.equal(a, b) for a, b in zip(whole, [*found[0], *found[1]], strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [*RULES])
def test_one_ends_and_comes_back_and_one_sends_nan(rule: str) -> None:
    """With late means, messages are in flight when one ends, and one joins between fragments."""
    with rendezvous() as address, ThreadPoolExecutor(4) as pool:
        one = start(pool, 1, lives, address, 0, "i2#2", "", 0, RULES[rule])
        two = start(pool, 1, lives, address, 1, "i2#2", "nan", 1, RULES[rule])
        three = start(pool, 1, lives, address, 2, "i2#2", "ends", 3, RULES[rule])
        with pytest.raises(AssertionError, match="died without a word"):
            three.result()
        again = start(pool, 1, lives, address, 2, "i2#2", "", 0, RULES[rule])
        (first,), (second,), (third,) = one.result(), two.result(), again.result()
    assert min(first) <= 1 and first.keys() == set(range(min(first), max(first) + 1))  # none missed
    assert alike(first, second) == len(first) and alike(first, second, third) == len(third) > 4
    assert all(bool(weights.isfinite().all()) for weights in first.values())


def saves(address: str, first: int, rule: str, folder: Path, steps: int) -> Tensor:
    """Save with messages in flight, and continue."""
    job = Job(block(address, **RULES[rule]), first=first).build().train(steps)
    of = job.job_meetings
    assert of.under_way and job.attached is not None
    weights = [parameter.detach().clone() for parameter in job.model.parameters()]
    torch.save([job.attached.state_dict(), weights, steps], folder / f"{first}.pt")
    job.train(STEPS - steps)
    found = job.weights()
    hybridcomp.detach(job.model)
    return found


def loads(address: str, first: int, rule: str, folder: Path, at_start: int) -> Tensor:
    """Resume from a save, if there is one."""
    job = Job(block(address, at_start=at_start, **RULES[rule]), first=first, seed=9).build()
    file, steps = folder / f"{first}.pt", 12
    if file.exists():
        state, weights, steps = torch.load(file)
        with torch.no_grad():
            for parameter, kept in zip(job.model.parameters(), weights, strict=True):
                parameter.copy_(kept)
        assert job.attached is not None
        job.attached.load_state_dict(state)
    job.step = steps
    if at_start == 2:
        job.train(STEPS - steps)
    else:
        while job.train(1).job_meetings.membership.last.number < 4:
            pass
    of = job.job_meetings
    assert not of.membership.last.silent
    starts = torch.cat([part.fragment.start for part in of.parts])
    found = job.weights() if at_start == 2 else starts
    hybridcomp.detach(job.model)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["streaming", "wsp", "far ahead"])
def test_checkpoints_hold_what_is_under_way(rule: str, tmp_path: Path) -> None:
    steps = 12 if rule == "wsp" else 13  # the number of means taken by then and a step later
    with rendezvous() as address:
        whole = beside(*((1, saves, (address, n, rule, tmp_path, steps + n // 2)) for n in (0, 2)))
    with rendezvous() as address:
        again = beside(*((1, loads, (address, n, rule, tmp_path, 2)) for n in (0, 2)))
    for (mine,), (theirs,) in zip(whole, again, strict=True):
        assert torch.equal(mine, theirs)
    with rendezvous() as address:  # with more islands, in-flight messages are sent again
        three = beside(*((1, loads, (address, n, rule, tmp_path, 3)) for n in (0, 2, 4)))
    assert torch.equal(three[0][0], three[1][0]) and torch.equal(three[0][0], three[2][0])


def ahead(address: str, folder: Path, slow: bool) -> tuple[int, float]:
    """Train with one slow island; return the maximum lead of this one in meetings.

    The slow one delays each message until the other is two ahead or at its end.
    """
    rule = {**RULES["wsp"], "staleness": 2, "fragments": 2, "every": 4}
    job, most = Job(block(address, **rule)).build(), 0
    begun = [folder / "slow", folder / "fast"]
    for step in range(24):
        if slow and (step + 1) % 4 in (0, 2):
            while count(begun[1]) < min(12, count(begun[0]) + 2):
                time.sleep(0.01)
            time.sleep(0.05)  # enough time to go too far
            with begun[0].open("a") as file:  # before it sends
                file.write(".")
        job.train(1)
        of = job.job_meetings
        mine = of.membership.last.number + len(of.under_way)
        if not slow:
            most = max(most, mine - count(begun[0]))
            begun[1].write_text("." * mine)
    row = of.row()
    assert row is not None
    hybridcomp.detach(job.model)
    return most, row["staleness"]


def count(file: Path) -> int:
    """Return how many meetings an island has begun."""
    return len(file.read_text()) if file.exists() else 0


def test_no_island_goes_further_ahead_than_it_may(tmp_path: Path) -> None:
    with rendezvous() as address:
        ((fast, shown),), _ = beside(*((1, ahead, (address, tmp_path, s)) for s in (False, True)))
    assert 1 < fast <= 2 * 2 and shown <= 2  # two meetings of each of two fragments


def test_how_many_meetings_are_under_way_when_one_begins() -> None:
    def most(**sync: Any) -> int:
        return CompressionConfig.parse({"sync": {"islands": 2, **sync}}).sync.most_under_way

    assert [most(every=30), most(preset="streaming"), most(preset="wsp")] == [0, 0, 0]
    assert most(every=8, fragments=4, delay=5, mix=0.5) == 2
    assert most(every=8, fragments=4, delay=7) == 3
    assert most(every=3, fragments=2, staleness=2) == 3
