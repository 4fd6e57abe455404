"""The rendezvous of islands that are jobs: decisions, silence, returns, bad input. No engine."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridcomp.errors import AgreementError, ConfigError, PeerError
from hybridcomp.job import waits
from hybridcomp.sync.rendezvous import Rendezvous
from hybridcomp.sync.roster import Roster
from hybridcomp.sync.store_line import StoreLine
from hybridcomp.tools.commands import rendezvous
from tests.ranks import fork_server
from tests.scripts_on_ranks import free_port


@dataclass
class Counter:
    """A single-rank island whose weight is a number: each meeting adds all islands' steps.

    ``sums``: the number after each meeting.
    """

    port: int
    name: str
    at_start: int = 2
    timeout_s: float = 10.0
    reached: tuple[str, int] | None = None
    weights: int = 0
    sums: dict[int, int] = field(default_factory=dict)
    last: Roster | None = None
    own: str = ""

    def __post_init__(self) -> None:
        self.line = StoreLine("127.0.0.1", self.port, 30.0, 10.0)
        self.meet = Rendezvous(self.line, 0, self.at_start, self.timeout_s, 20.0)

    def join(self) -> Counter:
        """Join with the giver's weights; start anew if there is no giver."""
        since = self.meet.decisions()
        self.own = self.meet.announce(self.name, self.reached)
        self.last = self.meet.admitted(self.own, since)
        if self.last.giver == self.own:
            self.meet.give(self.last.number, str(self.weights).encode())
            return self
        state = self.meet.take(self.last.number)
        if state is None:
            self.meet.give_up(self.own, self.last)
            return self.join()
        self.weights = int(state)
        return self

    def hold(self, moved: int = 1) -> Roster:
        """Hold the next meeting; join again if it was held without this island."""
        assert self.last is not None
        number = self.last.number + 1
        self.meet.post(self.own, number, str(moved).encode())
        self.meet.stand(self.own, number)
        now = self.meet.decide(self.last, self.own)
        if self.own not in now.present:
            self.meet.withdraw(self.own, number)
            self.join()
            return now
        messages = [self.meet.message_of(one, number) for one in now.present]
        self.weights += sum(int(one) for one in messages if one is not None)
        assert None not in messages
        if now.giver == self.own:
            self.meet.give(number, str(self.weights).encode())
        self.meet.forget(self.last, now, self.own)
        self.sums[number] = self.weights
        self.last = now
        return now


def together(*work: Any) -> None:
    """Run functions in threads; raise the first error."""
    with ThreadPoolExecutor(len(work)) as pool:
        for running in [pool.submit(one) for one in work]:
            running.result(60)


def test_islands_meet_one_comes_later_one_leaves(port: int) -> None:
    one, two, three = Counter(port, "a", weights=7), Counter(port, "b"), Counter(port, "c")
    together(one.join, two.join)
    assert one.last == two.last and one.last is not None and one.last.number == 0
    given = {"a": 7, "b": 0}[one.last.giver]
    together(one.hold, lambda: two.hold(2))
    assert (one.weights, two.weights) == (given + 3, given + 3)

    def one_and_two() -> None:
        while three.own not in one.last.members:  # type: ignore[union-attr]
            together(one.hold, two.hold)

    together(three.join, one_and_two)
    assert three.weights == one.weights
    together(one.hold, two.hold, three.hold)
    two.meet.leave(two.own, two.last.number + 1)  # type: ignore[union-attr]
    together(one.hold, three.hold)  # nobody waits for it
    assert one.last == three.last and one.last is not None
    assert sorted(one.last.present) == ["a", "c"] and not one.last.silent
    shared = one.sums.keys() & three.sums.keys()
    assert len(shared) == 2 and all(one.sums[n] == three.sums[n] for n in shared)


def test_a_silent_island_is_left_out_and_comes_back(port: int) -> None:
    islands = [Counter(port, name, 3, timeout_s=3.0) for name in "abc"]
    together(*(one.join for one in islands))
    one, two, late = islands
    together(*(one.hold for one in islands))
    together(one.hold, two.hold)
    assert one.last is not None and one.last == two.last
    assert one.last.silent == ["c"] and sorted(one.last.present) == ["a", "b"]

    def others() -> None:
        while not any(m.startswith("c") for m in one.last.members):  # type: ignore[union-attr]
            together(one.hold, two.hold)

    together(late.hold, others)
    assert late.own == "c#2" and late.weights == one.weights == two.weights
    together(*(one.hold for one in islands))
    assert late.weights == one.weights and late.own in one.last.present
    # the absent island's store entries are gone; of the others two meetings are
    assert not one.line.has("message/c/0/0/0") and not one.line.has("message/c/1/0/0")
    assert all(one.line.has(f"message/a/{slot}/0/0") for slot in (0, 1))


def test_a_run_whose_giver_has_ended_begins_again(port: int) -> None:
    giver = Counter(port, "far", 3, timeout_s=3.0, reached=("run", 9))
    giver.meet.announce("far", giver.reached)  # and ends
    one, two = Counter(port, "a", 2, timeout_s=3.0), Counter(port, "b", 2, timeout_s=3.0)
    one.meet.at_start = two.meet.at_start = 3
    three = Counter(port, "c", 3, timeout_s=3.0)
    together(one.join, two.join, three.join)
    together(one.hold, two.hold, three.hold)
    assert one.weights == two.weights == three.weights
    assert one.last is not None and len(one.last.present) == 3


def test_islands_that_all_ended_without_a_word_begin_again_under_their_names(port: int) -> None:
    """A scheduler ends all jobs with SIGTERM and restarts them: no member is left to decide."""
    one, two = Counter(port, "a", weights=3), Counter(port, "b")
    together(one.join, two.join)
    together(one.hold, two.hold)
    assert one.last is not None
    reached = ("run", one.last.number)
    again = [Counter(port, name, reached=reached, weights=5) for name in "ab"]
    together(*(island.join for island in again))
    assert sorted(island.own for island in again) == ["a#2", "b#2"]
    assert again[0].last == again[1].last and again[0].last is not None
    assert again[0].last.present == [] and again[0].last.number == one.last.number + 1
    together(*(island.hold for island in again))
    assert again[0].weights == again[1].weights == 7


def test_one_that_ended_without_a_word_begins_no_run_beside_the_others(port: int) -> None:
    one, two = Counter(port, "a", weights=3), Counter(port, "b", timeout_s=3.0)
    together(one.join, two.join)
    again = Counter(port, "a", at_start=1)

    def goes_on() -> None:
        while again.name + "#2" not in two.last.members:  # type: ignore[union-attr]
            two.hold()

    together(again.join, goes_on)
    assert two.last == again.last and two.last is not None and two.last.present == ["b"]


def test_large_messages_go_in_pieces(port: int) -> None:
    line = StoreLine("127.0.0.1", port)
    data = os.urandom((9 << 20) + 3)
    line.put("big", 4, data)
    assert bytes(line.take("big", 4) or b"") == data and line.take("big", 5) is None
    line.put("big", 6, b"")
    empty = line.take("big", 6)
    assert empty is not None and not empty
    line.drop_pieces("big")
    assert line.take("big", 6) is None and not line.has("big/2")


def test_bad_input_is_named_in_one_line(port: int) -> None:
    line = StoreLine("127.0.0.1", port)
    meet = Rendezvous(line, 0, 2, 1.0, 0.5)
    run = meet.compare({"compression.sync.every": 30, "elements": 12}, "a")
    assert meet.compare({"compression.sync.every": 30, "elements": 12}, "b") == run
    words = r"^compression.sync.every: island b has 10, .* begun by island a with 30 \(also: el.*\)"
    with pytest.raises(AgreementError, match=words) as error:
        meet.compare({"compression.sync.every": 10, "elements": 13}, "b")
    assert "\n" not in str(error.value)
    assert [meet.named(None), meet.named("x"), meet.named(None)] == ["0", "x", "1"]
    since = meet.decisions()
    own = meet.announce("a", None)
    with pytest.raises(PeerError, match=r"island a was not let in .* 1 of 2 islands \(at_start\)"):
        meet.admitted(own, since)


def test_an_island_that_comes_later_waits_for_those_that_meet(port: int) -> None:
    """If all of them have left, it waits for a new run."""
    one, two = Counter(port, "a"), Counter(port, "b")
    together(one.join, two.join)
    late = Rendezvous(one.line, 0, 2, 0.5, 0.5, say=lambda text: None)
    own, since = late.announce("c", None), late.decisions()
    with pytest.raises(PeerError, match=r"it waited for meeting 1 of (a, b|b, a): start"):
        late.admitted(own, since)
    late._append(Roster(1, [], heard=3))
    with pytest.raises(PeerError, match=r"it waited for a run to begin: 0 of 2 islands"):
        late.admitted(own, late.decisions())


def test_every_wait_says_what_it_waits_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "NOTICE_S", 0.1)
    told: list[str] = []
    with pytest.raises(ConfigError):
        StoreLine("127.0.0.1", 9, 0.4, say=told.append)
    assert re.search(r"nobody has listened at tcp://127.0.0.1:9 for .* --port 9` on", told[0])
    told.clear()
    line = StoreLine("127.0.0.1", port, say=told.append)
    assert not told
    meet = Rendezvous(line, 0, 2, 0.5, 1.5, say=told.append)
    own = meet.announce("a", None)
    with pytest.raises(PeerError):
        meet.admitted(own, 0)
    assert re.search(r"island a has waited .* 1 of 2 islands \(at_start\) are there", told.pop(0))
    told.clear()
    meet.stand("a", 1)
    assert meet.decide(Roster(0, ["a", "b"]), "a").silent == ["b"]
    assert re.search(r"meeting 1 has waited .* for b; who is not there after 0.5 s", told.pop(0))
    told.clear()
    assert meet.take(7) is None
    assert "for the weights that another island gives after meeting 7" in told[0]


def test_the_rendezvous_tells_who_comes_meets_and_leaves(port: int) -> None:
    told: list[str] = []
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    record = rendezvous.Record(store, told.append)
    one, two, three = Counter(port, "a"), Counter(port, "b"), Counter(port, "c", timeout_s=1.0)
    together(one.join, two.join)
    record.look()
    assert sorted(told[:2]) == ["island a has come", "island b has come"]
    assert told[2].startswith("a run begins; ") and "b joins, with the weights of " in told[2]
    together(one.hold, two.hold)
    record.look()
    assert len(told) == 3, "meetings alone are told every ten seconds"
    three.meet.announce("c", None)
    one.meet.timeout_s = two.meet.timeout_s = 1.0
    together(one.hold, two.hold)
    together(one.hold, two.hold)
    record.look()
    assert told[3] == "island c has come" and "meeting 2 of " in told[4] and "c joins" in told[4]
    assert told[5].endswith("; c was silent and is left out")
    two.meet.leave(two.own, two.last.number + 1)  # type: ignore[union-attr]
    record.look()
    record.look()
    assert told[6:] == ["island b has left"]
    one.hold()
    record.look()
    assert len(told) == 7
    one.line.append("joins", "no json")
    record.look()
    record.look()
    assert len(told) == 8 and told[7].startswith("cannot read what islands write here (JSONDecode")


def stop(pid: int) -> None:
    """Stop all threads of a process, and return when they are stopped."""
    os.kill(pid, signal.SIGSTOP)
    for folder in Path(f"/proc/{pid}/task").iterdir():
        while (folder / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)


def test_a_rendezvous_that_is_away_or_stopped_is_an_error() -> None:
    todo = r"was not there for 0.3 s .*: start `hybridcomp rendezvous --port 9` on that host first"
    with pytest.raises(ConfigError, match=rf"found tcp://127.0.0.1:9; the rendezvous {todo}"):
        StoreLine("127.0.0.1", 9, 0.3)
    port = free_port()
    server = fork_server().Process(target=rendezvous.run, args=(port,), daemon=True)
    server.start()
    try:
        line = StoreLine("127.0.0.1", port, request_s=1.0)
        line.set("a", "b")
        assert line.get("a") == b"b" and server.pid is not None
        with pytest.raises(ConfigError, match=rf"^--port: found {port}; .* in use; name another"):
            rendezvous.run(port)
        stop(server.pid)
        with pytest.raises(PeerError, match=r"rendezvous at .* has not answered for 1 s; start it"):
            line.get("a")
        os.kill(server.pid, signal.SIGCONT)
        os.kill(server.pid, signal.SIGTERM)
        server.join(20)
        assert server.exitcode == 0
        with pytest.raises(PeerError, match="does not answer|has not answered"):
            line.get("a")
    finally:
        server.kill()
        server.join()


def test_a_number_that_somebody_has_for_a_name_is_left_out(port: int) -> None:
    line = StoreLine("127.0.0.1", port)
    meet = Rendezvous(line, 0, 1, 10.0, 10.0)
    line.set("holders/0", "a living island")
    meet.announce("2", None)
    assert [meet.named(None), meet.named("0"), meet.named(None)] == ["1", "0", "3"]


def test_a_rendezvous_that_comes_late_is_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "NOTICE_S", 0.1)
    port, said = free_port(), threading.Event()
    held: list[TCPStore] = []

    def listen() -> None:
        said.wait(30.0)
        held.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    late = threading.Thread(target=listen)
    late.start()
    line = StoreLine("127.0.0.1", port, 60.0, say=lambda *_, **__: said.set())
    late.join()
    assert said.is_set() and line.add("one", 1) == 1
