"""Membership of one island job in a run: it joins, is dropped, and leaves.

All ranks of the island hold the same: what its first rank does alone at the rendezvous is told to
the others, errors as well.
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

#: times that an island tries to join where its givers end
TRIES = 10


def bytes_of(message: Tensor) -> memoryview:
    """Return the bytes of ``message``, which are not copied where it is on the CPU."""
    found: memoryview = message.cpu().numpy().data
    return found


class Membership:
    """An island's place in a run, on one rank.

    Attributes:
        meet: the rendezvous.
        transfer: carries messages to it and from it.
        name: of the island, always the same.
        own: what it is called since it joined; where it comes again, the name with a number.
        run: identifier of the run.
        last: what was decided of the last meeting.
        left_out, joined: islands that were left out, and that have joined, since they were read.
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
            jobs: the block's.
            facts: what all islands have alike.
            under_way: meetings that may be under way when a further one begins.
            say: tells the user a sentence, on the first rank.

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
        self._posted = -1  # the latest meeting to which this rank has sent, or is sending
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
        """Announce this island and wait until it is in; a collective of the island.

        Args:
            reached: how far its own state had got.
            has_state: gets start copies and momentum as a decision says; False where none come.

        Raises AgreementError where another living island has its name, PeerError where it is not
        let in or gets no weights.
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
        """Join again, as this island came too late for a meeting; a collective of the island."""
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
        """Send this rank's message for a meeting, and take those of the others when they come.

        Raises nothing; what goes wrong later the transfer's ``check`` raises.
        """
        self._posted = number
        self.transfer.send(self.own, number, message)
        self.transfer.expect(number, [one for one in self.last.members if one != self.own])

    def decide(self) -> Roster:
        """Return the decision on the next meeting; a collective of the island.

        Waits until all its ranks have posted, and only then for others, as long as ``timeout_s``.
        """
        self.transfer.wait_sent(self.last.number + 1)
        small_messages.wait_for_all()
        return self.meet.decide(self.last, self.own)

    def held(self, now: Roster, bad: Mapping[str, str]) -> None:
        """Advance to the next meeting; report absent, departed and joining islands.

        ``bad``: islands whose messages did not count, with what they did.
        """
        before, self.last = self.last, now
        self.transfer.forget(now.number)
        self.meet.forget(before, now, self.own)
        self.left_out += len(now.silent)
        self.joined += len(now.joining)
        left = [one for one in before.members if one not in (*now.present, *now.silent)]
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
        """Leave the run, so that nobody waits for this island (``departure``). No collective."""
        numbers = range(self.last.number + 1, self._posted + 1)
        depart(self.meet, self.transfer, self.own, numbers, self._limit_s, self._say)
        self._release()

    def _announced(self, reached: Reached) -> tuple[int, str]:
        """Return the number of decisions so far, and this island's name from now on."""
        assert self._held is not None, "the first rank"
        self._held.take()  # another may have it where this was stopped
        return self.meet.decisions(), self.meet.announce(self.name, reached)

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()

    def _of_first(self, work: Callable[[], Any]) -> Any:
        """Return on all ranks what ``work`` gives on the first; raise on all what it raises."""
        found: tuple[Any, HybridcompError | None] = None, None
        if not self.meet.place:
            try:
                found = work(), None
            except HybridcompError as error:
                error.__cause__ = None  # torch's errors cannot be sent
                error.names_rank = True  # all raise it alike
                found = None, error
        result, problem = small_messages.from_first(found)
        if problem is not None:
            raise problem
        return result

    def _tell_joined(self) -> None:
        own, last = self.own, self.last
        weights = "its own weights" if last.giver == own else f"the weights of {last.giver}"
        others = ", ".join(one for one in last.members if one != own) or "none"
        self._say(
            f"sync: island {own} joins after meeting {last.number} with {weights}; "
            f"the others: {others}"
        )
