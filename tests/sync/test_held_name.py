"""Island names: each belongs to one living island, and is released when it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

import hybridcomp
from hybridcomp.errors import AgreementError
from hybridcomp.sync import held_name
from hybridcomp.sync.held_name import HeldName
from hybridcomp.sync.store_line import StoreLine
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.sync.jobs import block, rendezvous
from tests.sync.torch_job import Job

Make = Callable[[str], HeldName]


@pytest.fixture
def make(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return holders of a name at a store, as of a process on a machine."""
    monkeypatch.setattr(held_name, "BEAT_S", 0.05)
    monkeypatch.setattr(held_name, "WATCH_S", 0.5)
    made: list[HeldName] = []

    def held_on(machine: str) -> HeldName:
        monkeypatch.setattr(held_name, "_machine", lambda: machine)
        made.append(HeldName(StoreLine("127.0.0.1", port, 30.0, 10.0), "a"))
        return made[-1]

    yield held_on
    for one in made:
        one.release()
    beating = [one for one in threading.enumerate() if one.name == "hybridcomp island lives"]
    for thread in beating:
        thread.join(60.0)  # it may wait for a key that its holder has dropped meanwhile
    assert not any(thread.is_alive() for thread in beating)
    line = StoreLine("127.0.0.1", port)
    assert not line.has("holders/a") and not line.has(f"beats/{made[0]._own['id']}")


@pytest.mark.parametrize("other", ["here", "elsewhere"])
def test_a_second_living_island_is_refused_and_names_both(make: Make, other: str) -> None:
    first = make("here")
    first.take()
    first.take()  # as when it joins again
    second = make(other)
    with pytest.raises(AgreementError) as caught:
        second.take()
    told, own = str(caught.value), first._own
    words = f"islands.name: found 'a', which a living island has, process {own['pid']} on "
    assert words in told and f"since {own['since']}; this one is process" in told
    assert "\n" not in told
    first.release()
    second.take()


def test_a_process_that_has_ended_lets_its_name_go_at_once(make: Make) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    first = make("here")
    while held_name._began(ended.pid) is not None:  # a zombie counts as ended
        pass
    first._text = json.dumps({**first._own, "pid": ended.pid, "began": "1"})
    first._line.first("holders/a", first._text)
    ended.wait()
    held_name.WATCH_S = 1000.0
    make("here").take()


@pytest.mark.parametrize("hides", ["all", "what it says"])
def test_a_process_that_cannot_be_looked_at_lives(
    make: Make, hides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for another user's process under ``hidepid`` of /proc: 2 hides all, 1 its files."""
    first = make("here")
    first.take()
    first._stop()  # as if it were stopped and silent
    monkeypatch.setattr(held_name, "PROC", tmp_path)
    if hides != "all":
        (tmp_path / str(first._own["pid"]) / "stat").mkdir(parents=True)  # a read raises OSError
    kill = mock.Mock(side_effect=PermissionError)
    monkeypatch.setattr("os.kill", kill)
    with pytest.raises(AgreementError, match="which a living island has"):
        make("here").take()
    assert kill.call_args.args == (first._own["pid"], 0)
    kill.side_effect = ProcessLookupError
    make("here").take()


@pytest.mark.parametrize("machine", by_day(["here", "elsewhere"], ["elsewhere"]))
def test_one_that_shows_no_life_has_ended_elsewhere_and_lives_here(
    make: Make, machine: str
) -> None:
    first = make("here")
    first.take()
    first._stop()
    second = make(machine)
    if machine == "here":
        with pytest.raises(AgreementError):
            second.take()
        return
    second.take()
    with pytest.raises(AgreementError):  # the stopped holder tries to join again
        first.take()
    first.release()
    assert second._line.get("holders/a") == second._text.encode()


def same_name(address: str) -> tuple[str, int]:
    """Train an island, and a second one of the same name; return its error."""
    told = block(address, 8.0, 1, name="a")
    first = Job(told).build().train(2)
    with pytest.raises(AgreementError) as caught:
        Job(told).build().train(1)
    first.train(2)
    last = first.job_meetings.membership.last
    assert last.present == ["a"] and not last.joining
    hybridcomp.detach(first.model)
    again = Job(told).build().train(2)
    return str(caught.value), again.job_meetings.membership.last.number


def test_the_first_of_two_islands_of_one_name_goes_on() -> None:
    with rendezvous() as address:
        one, other = run_ranks(2, same_name, address)
    assert one == other
    assert "found 'a', which a living island has, process" in one[0] and one[1] == 4
