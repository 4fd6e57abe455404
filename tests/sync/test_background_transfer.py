"""Messages of islands that are jobs in flight: order, overlap with training, failures."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import hybridcomp
from hybridcomp import log
from hybridcomp.errors import PeerError
from hybridcomp.sync import background_transfer as transfer_module
from hybridcomp.sync.background_transfer import BackgroundTransfer
from hybridcomp.sync.leave import depart
from hybridcomp.sync.rendezvous import BYE, HERE, Rendezvous
from hybridcomp.sync.store_line import StoreLine
from tests.ranks import run_ranks
from tests.sync.jobs import beside, block, rendezvous, store
from tests.sync.torch_job import Job


class HeldUp(Rendezvous):
    """A rendezvous that delays posts until ``opened``, and fails on demand."""

    opened = threading.Event()
    problem: Exception | None = None

    def post(self, own: str, number: int, message: bytes | memoryview) -> None:
        assert self.opened.wait(20)
        if self.problem is not None:
            raise self.problem
        super().post(own, number, message)


@contextmanager
def met(ranks: int = 1) -> Iterator[tuple[HeldUp, Callable[[], BackgroundTransfer]]]:
    """Yield a store with a connection, and a factory of an island's transfers."""
    transfers: list[BackgroundTransfer] = []

    def make() -> BackgroundTransfer:
        transfers.append(BackgroundTransfer(meet, ranks))
        return transfers[-1]

    with store() as port:
        meet = HeldUp(StoreLine("127.0.0.1", port, 30.0, 10.0), 0, 1, 10.0, 10.0, 2)
        meet.opened = threading.Event()
        yield meet, make
        meet.opened.set()
        for transfer in transfers:
            transfer.close(10.0)
    assert not [one for one in threading.enumerate() if one.name.startswith("hybridcomp islands")]


def test_messages_go_in_order_and_come_beside_the_training() -> None:
    with met() as (meet, make):
        one, two = make(), make()
        for number in (1, 2):
            one.send("a", number, memoryview(f"a{number}".encode()))  # returns at once
            two.expect(number, ["a"])
        assert not meet.stands(1, "a") and not meet.stands(2, "a")
        meet.opened.set()
        one.wait_sent(2)
        assert meet.stands(1, "a") and meet.stands(2, "a")
        deadline = time.monotonic() + 20
        while len(two._found) < 2:  # before anyone requests them
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [bytes(two.take(number, "a") or b"") for number in (1, 2)] == [b"a1", b"a2"]
        assert two.take(9, "a") is None  # decided, but gone
        two.expect(3, ["a"])
        two.forget(3)
        assert not two._wanted and not two._found


def test_an_island_stands_once_all_of_its_ranks_have_posted() -> None:
    with met(2) as (meet, make):
        meet.opened.set()
        first, second = make(), make()
        first.send("a", 1, memoryview(b"x"))
        first.wait_sent(1)
        assert not meet.stands(1, "a")
        second.send("a", 1, memoryview(b"x"))
        second.wait_sent(1)
        assert meet.stands(1, "a") and not meet.line.has("posted/1/a")


@pytest.mark.parametrize("problem", [PeerError("gone"), RuntimeError("a bug")])
def test_a_failure_is_raised_by_every_later_call_that_waits(problem: Exception) -> None:
    with met() as (meet, make):
        meet.problem = problem
        transfer = make()
        transfer.check()
        transfer.send("a", 1, memoryview(b"x"))
        meet.opened.set()
        words = "^gone$" if isinstance(problem, PeerError) else "has failed: RuntimeError.'a bug'"
        calls: list[Callable[[], object]] = [
            lambda: transfer.wait_sent(1), transfer.check, lambda: transfer.take(1, "b"),
            transfer.flush,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(PeerError, match=words):
                call()
        transfer.send("a", 2, memoryview(b"x"))  # other ranks may have sent theirs
        assert transfer.close(10.0) == 2


def test_the_end_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "REQUEST_ENDS_S", 0.1)
    with met() as (meet, make):
        transfer = make()
        for number in (1, 2, 3):
            transfer.send("a", number, memoryview(b"x"))
        assert transfer.close(0.05) == 3  # one is delayed
        monkeypatch.undo()
        meet.opened.set()


def test_what_is_lost_at_the_end_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An island's second rank cannot send its second message; the first leaves regularly."""
    monkeypatch.setattr(transfer_module, "REQUEST_ENDS_S", 0.1)
    with met(2) as (meet, make):
        first, second, held_up = make(), make(), copy.copy(meet)
        meet.opened.set()
        for transfer in (first, second):
            transfer.send("a", 1, memoryview(b"x"))
            transfer.wait_sent(1)
        first.send("a", 2, memoryview(b"x"))
        first.wait_sent(2)
        meet.opened.clear()
        second.send("a", 2, memoryview(b"x"))
        held_up.place = 1
        depart(held_up, second, "a", range(1, 3), 0.05, log.say)
        told = "rank 1 of island a ends and loses its message for 1 meeting(s), which the others "
        assert told in capsys.readouterr().out
        depart(meet, first, "a", range(1, 3), 0.05, log.say)
        words = "island a ends and loses 1 meeting(s), which the others hold without it: another "
        assert words in capsys.readouterr().out
        assert meet.line.get("stands/1/a") == HERE and meet.line.get("stands/2/a") == BYE
        monkeypatch.undo()
        meet.opened.set()


#: jobs that live until their process ends
KEPT: list[Job] = []


class Slow(Rendezvous):
    """A rendezvous over a slow link."""

    def post(self, own: str, number: int, message: bytes | memoryview) -> None:
        time.sleep(0.7)
        super().post(own, number, message)


def ends_while_it_sends(address: str) -> None:
    """Train, and end as a script does, while the second rank's late message is in flight."""
    job = Job(block(address, name="ends", preset="wsp")).build().train(3)
    KEPT.append(job)
    if dist.get_rank():
        meet: Any = job.job_meetings.membership.meet
        meet.__class__ = Slow
        job.job_meetings.membership.transfer.close(10.0)
        job.job_meetings.membership.transfer = BackgroundTransfer(meet, 2)
    job.train(1)


def goes_on(address: str) -> list[tuple[list[str], list[str]]]:
    """Train an island; return the members and the silent islands of each meeting."""
    job, found = Job(block(address, name="goes-on", preset="wsp"), first=2).build(), []
    for _ in range(4):
        last = job.train(2).job_meetings.membership.last
        found.append((sorted(last.present), last.silent))
    hybridcomp.detach(job.model)
    return found


def test_what_a_rank_still_sends_at_the_end_of_its_process_counts() -> None:
    with rendezvous() as address:
        _, (found, _) = beside((2, ends_while_it_sends, (address,)), (2, goes_on, (address,)))
    both = ["ends", "goes-on"]
    assert found == [([], []), (both, []), (both, []), (["goes-on"], [])]


def loses_its_rendezvous() -> tuple[int, str]:
    """Send to a rendezvous that has ended; return the later step with the error, and the error."""
    with rendezvous() as address:
        job = Job(block(address, 20.0, 1, preset="wsp", every=20)).build().train(19)
    job.train(1)  # sends; the mean is due at step 40
    for step in range(19):
        time.sleep(0.1)
        try:
            job.train(1)
        except PeerError as error:
            hybridcomp.detach(job.model)
            return step, str(error)
    raise AssertionError("nothing was told")


def test_a_message_that_fails_is_told_by_a_step_before_it_is_due() -> None:
    ((step, told),) = run_ranks(1, loses_its_rendezvous)
    assert step < 18 and "rendezvous at tcp://127.0.0.1:" in told and "\n" not in told


def is_not_let_in() -> str:
    """Resume from a checkpoint with a message in flight where the others never come."""
    with rendezvous() as address:
        first = Job(block(address, at_start=1, preset="wsp")).build().train(3)
        kept = first.job_meetings.state()
        assert kept is not None and first.job_meetings.under_way
        hybridcomp.detach(first.model)
    with rendezvous() as address:
        told = block(address, preset="wsp")
        told["sync"]["islands"]["join_timeout_s"] = 5.0
        job, said = Job(told).build(), io.StringIO()
        job.job_meetings.resume([kept])
        with contextlib.redirect_stdout(said), pytest.raises(PeerError, match="join_timeout_s"):
            job.train(1)
        hybridcomp.detach(job.model)
    return said.getvalue()


def test_who_is_not_let_in_has_lost_no_message_of_its_checkpoint() -> None:
    (said,) = run_ranks(1, is_not_let_in)
    assert "loses" not in said
