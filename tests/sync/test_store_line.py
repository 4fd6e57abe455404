"""The connection to the rendezvous: its thread survives until process exit, or its close."""

from __future__ import annotations

import gc
import threading

import pytest

from hybridcomp import log
from hybridcomp.errors import PeerError
from hybridcomp.sync.background_transfer import BackgroundTransfer
from hybridcomp.sync.held_name import HeldName
from hybridcomp.sync.leave import depart
from hybridcomp.sync.rendezvous import Rendezvous
from hybridcomp.sync.store_line import StoreLine


def starts_none(_: threading.Thread) -> None:
    """Refuse new threads, as Python 3.12 does once exit handlers run."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_an_island_leaves_while_the_interpreter_starts_no_thread(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = StoreLine("127.0.0.1", port, 30.0, 10.0)
    meet = Rendezvous(line, 0, 1, 10.0, 20.0)
    name, transfer = HeldName(line, "a"), BackgroundTransfer(meet, 1)
    name.take()
    own = meet.announce("a", None)
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", starts_none)
        depart(meet, transfer, own, range(0), 5.0, log.say)
        name.release()
        with pytest.raises(PeerError, match="cannot be asked.*interpreter shutdown"):
            line.again()
    assert line.get("holders/a") is None
    # the name is free at once, and the next to join does not wait
    name = HeldName(line, "a")
    name.take()
    name.release()


def test_the_thread_of_a_line_ends_with_it(port: int) -> None:
    line = StoreLine("127.0.0.1", port, 30.0, 10.0)
    before = set(threading.enumerate())
    other = line.again()
    (thread,) = set(threading.enumerate()) - before
    assert other.get("nothing") is None and other.add("one", 1) == 1
    assert set(threading.enumerate()) - before == {thread}, "one for all requests"
    del other
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_request_that_hangs_is_left_behind_and_the_next_one_is_answered(port: int) -> None:
    line = StoreLine("127.0.0.1", port, 30.0, 0.2)
    held = threading.Event()
    with pytest.raises(PeerError, match=r"has not answered for 0\.2 s"):
        line._ask(held.wait)
    assert line.add("one", 1) == 1
    held.set()
