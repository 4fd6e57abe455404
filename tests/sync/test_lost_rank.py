"""A later rank of an island that is a job ends: reaction of its island, and of the others."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hybridcomp
from tests.ranks import RankPool
from tests.selection import by_day
from tests.sync.jobs import block, rendezvous
from tests.sync.torch_job import Job

#: seconds that an island waits for a silent one; a busy one needs less
TIMEOUT_S = 6.0
#: time of the second rank's end -> last meeting with its island present, whether the others wait
#: for it at the next one, and the first rank's message when it leaves
WHEN: dict[str, tuple[int, bool, str]] = {
    "between two meetings": (2, False, ""),
    "before it has sent": (2, True, "island loses ends and loses 1 meeting(s), which the others "),
    "before the decision": (3, False, ""),
    "before it takes the mean": (3, False, ""),
}


def end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loses(address: str, folder: Path, when: str) -> None:
    """Train an island of two ranks, the second of which ends; the first writes its messages."""
    job: Any = Job(block(address, TIMEOUT_S, name="loses")).build().train(4)
    membership = job.job_meetings.membership
    if dist.get_rank() == 1:
        if when == "between two meetings":
            job.train(1)
            end()
        elif when == "before it has sent":
            membership.transfer.send = end
        elif when == "before the decision":
            membership.meet.decide = end
            job.train(2)
        else:
            job.job_meetings._rows = end
    with contextlib.redirect_stdout(io.StringIO()) as said:
        with pytest.raises(Exception, match="Connection|connection"):
            job.train(4)
        hybridcomp.detach(job.model)
    (folder / "said").write_text(said.getvalue())


def goes_on(address: str) -> tuple[list[tuple[list[str], list[str]]], str]:
    """Train an island; return members and silent islands of each meeting, and its messages."""
    job, found = Job(block(address, TIMEOUT_S, name="goes-on"), first=2).build(), []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for _ in range(6):
            last = job.train(2).job_meetings.membership.last
            found.append((sorted(last.present), last.silent))
        hybridcomp.detach(job.model)
    return found, said.getvalue()


def run(ranks: int, *work: Any) -> list[Any]:
    with RankPool(ranks) as pool:
        return pool.run(*work, grace=60.0)


@pytest.mark.parametrize("when", by_day(WHEN, ["before it has sent"]))
def test_the_others_go_on_without_the_island(when: str, tmp_path: Path) -> None:
    """The rest of the island fails at its next message, and leaves; waiting ones are notified."""
    present, waits, words = WHEN[when]
    with rendezvous() as address, ThreadPoolExecutor(2) as jobs:
        ended = jobs.submit(run, 2, loses, address, tmp_path, when)
        other = jobs.submit(run, 2, goes_on, address)
        with pytest.raises(AssertionError, match="rank 1 of 2:\ndied without a word") as caught:
            ended.result()
        assert "rank 0" not in str(caught.value)
        (found, said), _ = other.result()
    both, one = ["goes-on", "loses"], ["goes-on"]
    assert [members for members, _ in found] == [both] * present + [one] * (6 - present)
    silent = [gone for _, gone in found]
    assert silent.pop(present) == (["loses"] if waits else []) and not any(silent)
    left = f"without loses, silent for {TIMEOUT_S:g} s" if waits else "loses left the run"
    assert f"sync: meeting {present + 1} of 1 island(s): {left}" in said
    assert words in (tmp_path / "said").read_text()
