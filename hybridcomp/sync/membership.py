"""Membership of one island job in a run: it joins, is dropped, and leaves.

All ranks of the island hold the same state: only the island's first rank talks to the rendezvous,
and it broadcasts results and errors to the other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.config.rendezvous import RendezvousConfig
from hybridcomp.errors import HybridcompError, PeerError
from hybridcomp.job import small_messages
from hybridcomp.sync.background_transfer import BackgroundTransfer
from hybridcomp.sync.held_name import HeldName
from hybridcomp.sync.leave import depart
from hybridcomp.sync.rendezvous import Rendezvous
from hybridcomp.sync.roster import Reached, Roster
from hybridcomp.sync.store_line import KEY, StoreLine

#: most attempts of an island to join if its givers end
TRIES = 10


def bytes_of(message: Tensor) -> memoryview:
    """Return the bytes of ``message``, without a copy if it is on the CPU."""
    found: memoryview = message.cpu().numpy().data
    return found


class Membership:
    """An island's membership in a run, on one rank.

    Attributes:
        meet: the rendezvous.
        transfer: carries messages to and from the rendezvous.
        name: permanent name of the island.
        own: name under which it joined: the permanent name, with a number if it has joined before.
        run: identifier of the run.
        last: decision on the last meeting.
        left_out, joined: numbers of islands that were left out and that joined since the counts
            were last read.
    """

    def __init__(
        self,
        jobs: RendezvousConfig,
        facts: Mapping[str, Any],
        under_way: int,
        say: Callable[..., object],
    ) -> None:
        """Connect, and compare ``facts`` with the run's; a collective of the island.

        Args:
            jobs: the block's rendezvous settings.
            facts: facts that must be equal in all islands.
            under_way: most meetings that may be pending when another begins.
            say: prints a sentence for the user, on the first rank.

        Raises AgreementError, PeerError.
        """
        self._say, self._limit_s = say, jobs.timeout_s
        line = StoreLine(*jobs.address, jobs.join_timeout_s, say=say)
        self.meet = Rendezvous(
            line, dist.get_rank(), jobs.at_start, jobs.timeout_s, jobs.join_timeout_s, under_way,
            say,
        )  # fmt: skip
        self.own, self.last = "", Roster(-1, [])
        self.left_out = self.joined = 0
        self._posted = -1  # latest meeting to which this rank has sent or is sending
        self._held: HeldName | None = None

        def introduced() -> tuple[str, str]:
            name = self.meet.named(jobs.name)
            run = self.meet.compare(facts, name)
            self._held = HeldName(line, name, say)
            self._held.take()
            return name, run

        try:
            self.name, self.run = self._of_first(introduced)
            self.transfer = BackgroundTransfer(self.meet, dist.get_world_size())
        except BaseException:
            self._release()
            raise

    def join(self, reached: Reached, has_state: Callable[[Roster], bool]) -> None:
        """Announce this island and wait until it is admitted; a collective of the island.

        Args:
            reached: the run and meeting that this island's state has reached.
            has_state: fetches start copies and momentum from the decision's giver; returns False if
                none come.

        Raises AgreementError if another living island has its name, PeerError if it is not admitted
        or gets no weights.
        """
        for _ in range(TRIES):
            since, self.own = self._of_first(functools.partial(self._announced, reached))
            self.last = self.meet.admitted(self.own, since)
            if has_state(self.last):
                self._tell_joined()
                return
            if not self.meet.place:
                self.meet.give_up(self.own, self.last)
            self._say(f"sync: island {self.own} got no weights from {self.last.giver}")
        raise PeerError(
            f"{KEY}: island {self.own} got no weights from {TRIES} peers within "
            f"{self._limit_s:g} s each; raise timeout_s"
        )

    def come_back(self, has_state: Callable[[Roster], bool]) -> None:
        """Join again, because this island was too late for a meeting; a collective of the
        island.
        """
        number = self.last.number + 1
        self.transfer.flush()
        self.meet.withdraw(self.own, number)
        self._posted = -1
        self.left_out += 1
        self._say(
            f"sync: island {self.own} came too late for meeting {number} and takes the weights of "
            "a peer; what it has moved and the others have not counted is lost"
        )
        self.join(None, has_state)

    def post(self, number: int, message: memoryview) -> None:
        """Queue this rank's message for a meeting, and start to fetch the other islands' messages.

        It never raises; the transfer's ``check`` raises later errors.
        """
        self._posted = number
        self.transfer.send(self.own, number, message)
        self.transfer.expect(number, [member for member in self.last.members if member != self.own])

    def decide(self) -> Roster:
        """Return the decision on the next meeting; a collective of the island.

        It waits until all ranks of this island have posted, then up to ``timeout_s`` for other
        islands.
        """
        self.transfer.wait_sent(self.last.number + 1)
        small_messages.wait_for_all()
        return self.meet.decide(self.last, self.own)

    def held(self, now: Roster, bad: Mapping[str, str]) -> None:
        """Advance to the next meeting; report absent, departed and joining islands.

        ``bad``: islands whose messages did not count, with the reasons.
        """
        before, self.last = self.last, now
        self.transfer.forget(now.number)
        self.meet.forget(before, now, self.own)
        self.left_out += len(now.silent)
        self.joined += len(now.joining)
        left = [member for member in before.members if member not in (*now.present, *now.silent)]
        words = []
        if now.silent:
            words += [f"without {', '.join(now.silent)}, silent for {self._limit_s:g} s"]
        words += [f"{', '.join(left)} left the run"] if left else []
        words += [f"{island} {what} and did not count" for island, what in bad.items()]
        words += [f"{', '.join(now.joining)} joins"] if now.joining else []
        if words:
            count = len(now.present)
            self._say(f"sync: meeting {now.number} of {count} island(s): {'; '.join(words)}")

    def leave(self) -> None:
        """Leave the run, so that nobody waits for this island. No collective."""
        numbers = range(self.last.number + 1, self._posted + 1)
        depart(self.meet, self.transfer, self.own, numbers, self._limit_s, self._say)
        self._release()

    def _announced(self, reached: Reached) -> tuple[int, str]:
        """Return the number of decisions so far, and this island's name from now on."""
        assert self._held is not None, "the first rank"
        self._held.take()  # while this island was stopped, another island may have taken its name
        return self.meet.decisions(), self.meet.announce(self.name, reached)

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()

    def _of_first(self, work: Callable[[], Any]) -> Any:
        """Return ``work``'s result on the first rank to all ranks; raise its error on all."""
        found: tuple[Any, HybridcompError | None] = None, None
        if not self.meet.place:
            try:
                found = work(), None
            except HybridcompError as error:
                error.__cause__ = None  # torch's errors cannot be pickled
                error.names_rank = True  # all ranks raise the same error
                found = None, error
        result, problem = small_messages.from_first(found)
        if problem is not None:
            raise problem
        return result

    def _tell_joined(self) -> None:
        own, last = self.own, self.last
        weights = "its own weights" if last.giver == own else f"the weights of {last.giver}"
        others = ", ".join(member for member in last.members if member != own) or "none"
        self._say(
            f"sync: island {own} joins after meeting {last.number} with {weights}; "
            f"the others: {others}"
        )
