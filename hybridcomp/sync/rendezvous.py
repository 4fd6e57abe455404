"""Let islands that are separate jobs meet through a store that outlives them all.

The store keeps two lists that only grow. The list of announcements has an entry for each start of
an island. In the list of decisions, entry n gives the members after meeting n: ``present`` islands,
whose messages count, ``joining`` islands, which take weights from ``giver`` and take part from
meeting n + 1 on, and ``silent`` islands, which did not stand in time. The first island to append
entry n decides it, and all islands read that entry.

1. Each rank puts its message for meeting n into the store (``post``); the island's last rank to do
   so marks the island as standing (``stand``).
2. The first rank of each island waits, at most ``timeout_s``, until all members of the last
   decision stand, and appends decision n; all other ranks read it (``decide``).
3. Each rank of a present island reads the messages of the ranks with its index in all present
   islands (``message_of``). The messages are in the store, so a meeting goes on if an island ends.
4. An island that stood too late sees that it was left out, and announces itself again.

With ``delay`` or ``staleness`` islands begin up to U further meetings before they read decision n.
An island that stands at meeting n has read all messages up to n - U - 1, so the message of meeting
n + 2 U + 2 may overwrite that of meeting n.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from hybridcomp.errors import AgreementError, PeerError
from hybridcomp.job.waits import Notices, awaited, unsaid
from hybridcomp.sync.roster import Reached, Roster
from hybridcomp.sync.store_line import KEY, StoreLine

#: an island's state at a meeting: it stands, or it has left for good
HERE, BYE = b"here", b"bye"
#: extra seconds that ranks wait for their island's first rank, which may itself be waiting
SLACK_S = 60.0


class Rendezvous:
    """One rank's requests to the store.

    Args:
        line: connection to the store.
        place: index of the rank in its island; the first rank decides for the island.
        at_start: number of islands with which a run begins.
        timeout_s: seconds for which an island waits for the others at a meeting.
        join_timeout_s: seconds for which an island waits until it may join.
        under_way: U, the most meetings that may be pending when another begins.
        say: prints, on the first rank, what a long wait is for.
    """

    def __init__(
        self,
        line: StoreLine,
        place: int,
        at_start: int,
        timeout_s: float,
        join_timeout_s: float,
        under_way: int = 0,
        say: Callable[..., object] = unsaid,
    ) -> None:
        self.line, self.place, self.at_start, self.say = line, place, at_start, say
        self.timeout_s, self.join_timeout_s = timeout_s, join_timeout_s
        self.under_way, self.slots = under_way, 2 * under_way + 2

    def clone_connection(self) -> Rendezvous:
        """Return a copy with its own connection, for another thread."""
        found = copy.copy(self)
        found.line = self.line.again()
        return found

    # who takes part; only the first rank of an island calls these, unless a docstring says
    # otherwise

    def compare(self, facts: Mapping[str, Any], name: str) -> str:
        """Compare ``facts`` (JSON-like) with the run's; return the run's identifier.

        The first island of a run sets the run's facts. Raises AgreementError, which names the first
        difference, only on the island whose facts differ.
        """
        mine = json.dumps({"of": name, "run": f"{time.time_ns():x}", "facts": facts})
        theirs = json.loads(self.line.first("facts", mine))
        own = json.loads(mine)["facts"]
        differing = [k for k in {**theirs["facts"], **own} if theirs["facts"].get(k) != own.get(k)]
        if differing:
            key, more = differing[0], f" (also: {', '.join(differing[1:])})"
            raise AgreementError(
                f"{key}: island {name} has {own.get(key)!r}, and the run at {self.line.address} "
                f"was begun by island {theirs['of']} with {theirs['facts'].get(key)!r}"
                f"{more if differing[1:] else ''}; start it with the same model, layout and block"
            )
        return str(theirs["run"])

    def named(self, name: str | None) -> str:
        """Return ``name``; if it is empty, a number that no island of this run has used."""
        while not name:
            found = str(self.line.add("names", 1) - 1)
            taken = self.line.get(f"holders/{found}") or self.line.get(f"starts/{found}")
            name = None if taken else found
        return name

    def announce(self, name: str, reached: Reached) -> str:
        """Announce that an island wants to join; return its name in the run, numbered if it
        rejoins.

        ``reached``: the run and meeting that its loaded state has reached.
        """
        times = self.line.add(f"starts/{name}", 1)
        own = name if times == 1 else f"{name}#{times}"
        self.line.append("joins", json.dumps({"island": own, "reached": reached}))
        return own

    def admitted(self, own: str, since: int) -> Roster:
        """Wait until ``own`` is joining, and return that decision; all ranks call it.

        ``since``: number of decisions before the announcement. If there is no run yet, or all
        islands have left it, the first rank begins one once ``at_start`` islands have announced
        themselves. Raises PeerError after ``join_timeout_s``.
        """
        number, notices = since, Notices()
        limit = self.join_timeout_s + (SLACK_S if self.place else 0.0)
        while notices.seconds < limit:
            found = awaited(functools.partial(self._found, number), 1.0)
            if found is not None and own in found.joining:
                return found
            if found is not None:
                number += 1
            elif not self.place and notices.due():
                self.say(
                    f"sync: island {own} has waited {notices.seconds:.0f} s "
                    f"{self._awaited(number)}; join_timeout_s is {self.join_timeout_s:g} s"
                )
        raise PeerError(
            f"{KEY}: island {own} was not let in within {self.join_timeout_s:g} s; it waited "
            f"{self._awaited(number)}: start what is missing, raise join_timeout_s, or, where "
            "those have ended, begin with another rendezvous"
        )

    def decisions(self) -> int:
        """Return the number of decisions."""
        return self.line.length("decided")

    def decision(self, number: int) -> Roster | None:
        """Return a decision, None if there is none yet."""
        found = self.line.get(f"decided/{number}")
        return None if found is None else Roster(**json.loads(found))

    def leave(self, own: str, number: int) -> None:
        """Announce that the island is absent from meeting ``number`` on, so that nobody waits for
        it.
        """
        self.line.set(f"stands/{number}/{own}", BYE)

    # a meeting

    def post(self, own: str, number: int, message: bytes | memoryview) -> None:
        """Put this rank's message for meeting ``number`` into the store."""
        self.line.put(self._message(own, number), number, message)

    def stand(self, own: str, number: int, ranks: int = 1) -> None:
        """Mark that this rank has posted; once all ``ranks`` of the island have, the island
        stands.
        """
        if ranks > 1:
            posted = f"posted/{number}/{own}"
            if self.line.add(posted, 1) < ranks:
                return
            self.line.drop(posted)
        self.line.set(f"stands/{number}/{own}", HERE)
        self.line.drop(f"stands/{number - self.slots}/{own}")

    def stands(self, number: int, island: str) -> bool:
        """Return whether an island stands at a meeting, or left earlier."""
        return self.line.has(f"stands/{number}/{island}")

    def decide(self, last: Roster, own: str) -> Roster:
        """Return the decision on the meeting after ``last``; all ranks of the island call it.

        The first rank waits up to ``timeout_s`` for the members of ``last``, and decides unless
        another island has; the other ranks wait for the decision.
        """
        number = last.number + 1
        if self.place:
            limit = self.timeout_s + SLACK_S
            found = awaited(lambda: self.decision(number), limit)
            if found is None:
                raise PeerError(
                    f"{KEY}: the first rank of island {own} has decided nothing on meeting "
                    f"{number} for {limit:g} s; see what became of it"
                )
            return found
        keys = [f"stands/{number}/{member}" for member in last.members]

        def look() -> Roster | bool | None:
            return self.decision(number) or (True if self.line.has(*keys) else None)

        def notice(waited: float) -> None:
            missing = [one for one, key in zip(last.members, keys, strict=True)
                       if not self.line.has(key)]  # fmt: skip
            self.say(
                f"sync: meeting {number} has waited {waited:.0f} s for "
                f"{', '.join(missing) or 'its decision'}; who is not there after "
                f"{self.timeout_s:g} s (timeout_s) is left out"
            )

        found_or_all = awaited(look, self.timeout_s, notice)
        if isinstance(found_or_all, Roster):
            return found_or_all
        stands = {member: self.line.get(f"stands/{number}/{member}") for member in last.members}
        present = [member for member, word in stands.items() if word == HERE]
        silent = [member for member, word in stands.items() if word is None]
        joining, heard = self._announced(last.heard)
        # this island is the giver, since other islands may get here later
        giver = own if joining else ""
        return self._append(Roster(number, present, joining, giver, silent, heard))

    def message_of(self, island: str, number: int) -> bytearray | None:
        """Return the message of ``island``'s rank with this rank's index; None: it is lost."""
        return self.line.take(self._message(island, number), number)

    def withdraw(self, own: str, number: int) -> None:
        """Delete this rank's messages for meetings from ``number`` on, held without its island."""
        for one in range(number, number + self.under_way + 1):
            self._withdraw_one(own, one)

    def forget(self, last: Roster, now: Roster, own: str) -> None:
        """Delete keys that no island reads after ``now``; all ranks of a present island call it.

        These are the messages of islands that ended U meetings ago, and the state given to the
        islands that join in ``last``.
        """
        if own != now.present[0]:
            return
        if last.joining:
            self.line.drop_pieces(self._state(last.number))
        ended = now.number - self.under_way
        before, at = self.decision(ended - 1), self.decision(ended)
        for island in before.members if before is not None and at is not None else ():
            if at is not None and island not in at.present:
                for one in range(ended - self.slots, ended + self.under_way + 1):
                    self._withdraw_one(island, one)

    # weights for joining islands

    def give(self, number: int, state: bytes | memoryview) -> None:
        """Store the state after meeting ``number`` for joining ranks with this rank's index."""
        self.line.put(self._state(number), number, state)

    def take(self, number: int) -> bytearray | None:
        """Wait up to ``timeout_s`` for the giving island's state; None: nothing came."""

        def notice(waited: float) -> None:
            if not self.place:
                self.say(
                    f"sync: has waited {waited:.0f} s for the weights that another island gives "
                    f"after meeting {number}, at most {self.timeout_s:g} s (timeout_s)"
                )

        def look() -> bytearray | None:
            return self.line.take(self._state(number), number)

        return awaited(look, self.timeout_s, notice)

    def give_up(self, own: str, decision: Roster) -> None:
        """Leave before the first meeting, because nothing came from the giver.

        At the beginning of a run no other island would notice that the giver has ended, so this
        also marks the giver as having left; if the giver is alive after all, it sees that it was
        left out.
        """
        self.leave(own, decision.number + 1)
        if not decision.present:
            self.line.first(f"stands/{decision.number + 1}/{decision.giver}", BYE.decode())

    # inside

    def _found(self, number: int) -> Roster | None:
        """Return decision ``number``; if it begins a run and is missing, try to make it."""
        found = self.decision(number)
        if found is not None or self.place:
            return found
        last = self.decision(number - 1) if number else Roster(-1, [])
        if last is None or not all(self._has_left(member, number) for member in last.members):
            return None
        joining, heard = self._announced(last.heard)
        if len(joining) < self.at_start:
            return None
        giver = max(joining, key=lambda island: (joining[island] or ["", -1])[1])
        return self._append(Roster(number, [], joining, giver, [], heard))

    def _has_left(self, member: str, number: int) -> bool:
        """Return whether a member has left: its mark may be at any meeting pending at ``number``.

        A member whose name was announced again has ended without notice, as on SIGTERM.
        """
        name, _, times = member.partition("#")
        if int(self.line.get(f"starts/{name}") or 0) > int(times or 1):
            return True
        numbers = range(number, number + self.under_way + 2)
        return any(self.line.get(f"stands/{one}/{member}") == BYE for one in numbers)

    def _announced(self, heard: int) -> tuple[dict[str, list[Any] | None], int]:
        """Return the islands announced after the first ``heard``, and the number of
        announcements.
        """
        found = {}
        while (text := self.line.get(f"joins/{heard}")) is not None:
            one = json.loads(text)
            found[one["island"]] = one["reached"]
            heard += 1
        return found, heard

    def _withdraw_one(self, island: str, number: int) -> None:
        self.line.drop_pieces(self._message(island, number))
        for said in ("posted", "stands"):
            self.line.drop(f"{said}/{number}/{island}")

    def _append(self, decision: Roster) -> Roster:
        text = self.line.first(f"decided/{decision.number}", json.dumps(asdict(decision)))
        return Roster(**json.loads(text))

    def _awaited(self, number: int) -> str:
        """Tell the user what a joining island is waiting for."""
        last = self.decision(number - 1) if number else None
        if last is None or not last.members:
            there = len(self._announced(0 if last is None else last.heard)[0])
            return f"for a run to begin: {there} of {self.at_start} islands (at_start) are there"
        return f"for meeting {number} of {', '.join(last.members)}"

    def _message(self, island: str, number: int) -> str:
        return f"message/{island}/{number % self.slots}/{self.place}"

    def _state(self, number: int) -> str:
        return f"state/{number}/{self.place}"
