"""Hold meetings with islands that are separate jobs, which come and go.

Every ``every`` steps this job, which is one island, sends its weight change and applies the mean of
all present islands (``rendezvous``). Every present island reads the same messages in the same
order, so that all islands have start copies and momentum equal bit for bit. No island can block a
meeting:

* An island that has ended or hangs is left out after ``timeout_s``. If it comes back, it learns
  that it was left out; its work since the previous meeting is lost.
* A joining island takes start copies, momentum and the clock from a peer at a meeting, and takes
  part from the next meeting on. If all islands resume from checkpoints of the same meeting, each
  continues from its own checkpoint, bit for bit.
* The message of an island that sent NaN, Inf or an outlier does not count, and this island returns
  to the weights of the other islands.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.job import saved, small_messages
from hybridcomp.job.gates import gate
from hybridcomp.sync import island_payloads
from hybridcomp.sync.checkpoint_state import WHAT, entry_of_island, load_entry, state_of
from hybridcomp.sync.claimed_folders import claim, claim_url
from hybridcomp.sync.given_state import (
    arrived,
    state_for_others,
    take_state,
)
from hybridcomp.sync.island_facts import facts_of
from hybridcomp.sync.master_weights import Masters
from hybridcomp.sync.membership import Membership, bytes_of
from hybridcomp.sync.outliers import unfit
from hybridcomp.sync.progress import Meeting
from hybridcomp.sync.roster import Reached, Roster
from hybridcomp.sync.sync_follower import SyncFollower, drift_of


class JobMeetings(SyncFollower):
    """Meetings with other jobs; all ranks of this job call it."""

    def __init__(
        self, channel: Channel, make: Callable[[], Masters], say: Callable[..., object]
    ) -> None:
        """Prepare for meetings; see ``SyncFollower``."""
        super().__init__(channel, make, say)
        assert self.config.jobs is not None, "the block was asked"
        self.jobs = self.config.jobs
        self._membership: Membership | None = None

    @property
    def membership(self) -> Membership:
        """Return this island's membership in the run, once meetings have begun."""
        assert self._membership is not None, "begun"
        return self._membership

    # followers

    def after_step(self, step: int) -> None:
        """Hold the meetings that are due; raise the error of a transfer that failed meanwhile."""
        if self._membership is not None and not self._is_due(self.clock + 1):
            self._membership.transfer.check()  # if a meeting is due, all ranks check together
        super().after_step(step)

    def _is_due(self, clock: int) -> bool:
        """Return whether a meeting begins or ends at ``clock``."""
        takes = bool(self.under_way) and self.under_way[0].due <= clock
        return takes or self.config.fragment_at(clock) is not None

    def row(self) -> dict[str, float] | None:
        """Return figures and present islands since the last call; None if there was no meeting."""
        found, of = super().row(), self.membership
        if found is None:
            return None
        left_out, of.left_out, joined, of.joined = of.left_out, 0, of.joined, 0
        return {
            **found,
            "islands": float(len(of.last.members)),
            "left_out": float(left_out),
            "joined": float(joined),
        }

    def close(self) -> None:
        """Leave the run, so that nobody waits for this island, and free its state."""
        if self._membership is not None:
            self._membership.leave()
        self._membership = None
        super().close()

    def __del__(self) -> None:
        """Leave the run if the model was dropped without calling ``close``."""
        if getattr(self, "_membership", None) is not None:
            self.close()

    def _island(self) -> str | None:
        of = self._membership
        return None if of is None or of.meet.place else of.own

    # coming

    def _begin(self) -> None:
        self._cut(None)
        facts, at_once = facts_of(self._channel, self.masters), self.config.most_under_way
        self._membership = Membership(self.jobs, facts, at_once, self._say)
        reached = self._load()
        self._membership.join(reached, self._has_state)
        self._post_under_way()

    def _count_islands(self) -> None:
        """Tell the ledger the number of islands that would form one data-parallel group."""
        self._channel.state.islands = len(self.membership.last.members)

    def _post_under_way(self) -> None:
        """Post the messages of pending meetings again, under this run's names."""
        self._count_islands()
        first = self.membership.last.number + 1
        for number, meeting in enumerate(self.under_way, first):
            self.membership.post(number, bytes_of(meeting.rows))

    def _load(self) -> Reached:
        """Load this island's state from a checkpoint; return the meeting that it had reached."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return None
        entry = entry_of_island(loaded, self.progress, self.masters.digest, self.config.late)
        if entry is None:
            self._say(
                "sync: the checkpoint holds no state of this island, with as many ranks, the same "
                "weights and fragments and what is under way as late; it takes that of a peer, or "
                "begins anew"
            )
            return None
        load_entry(entry, self.progress)
        return str(entry["run"]), int(entry["meeting"])

    def _has_state(self, roster: Roster) -> bool:
        """Fetch the state after the meeting at which this island joins; False if none came."""
        own, giver = self.membership.own, roster.giver
        reached = roster.joining[own]
        alike = all(one is not None and one == reached for one in roster.joining.values())
        if giver == own:
            if not alike:
                self.progress.give_up()
                self._give(roster)
            return True
        # if all islands resume from the same meeting, each keeps its own state
        ours = reached is not None and roster.joining.get(giver) == reached
        if ours and (alike or not self.config.late):
            return True
        data = self.membership.meet.take(roster.number)
        there = self.parts[0].fragment.start.new_tensor([data is not None], dtype=torch.int32)
        if not int(small_messages.least(there)) or data is None:
            return False
        self._to_write.clear()  # drop values that an earlier giver sent
        take_state(island_payloads.unpack_state(data), self.progress, self._write)
        return True

    def _give(self, roster: Roster) -> None:
        state = island_payloads.pack_state(state_for_others(self.progress))
        self.membership.meet.give(roster.number, state)

    # meetings

    def _send(self, index: int) -> Exception | None:
        """Send the weight change of this rank's part of a fragment to the rendezvous."""
        of, part, began = self.membership, self.parts[index], time.perf_counter()
        of.transfer.check()
        self.masters.check()
        now = self.masters.read(part.low, part.high, part.numel)
        data = island_payloads.pack(self._channel, part.fragment.send(now))
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._figures.ahead = max(self._figures.ahead, len(part.fragment.under_way) - 1)
        self.under_way.append(Meeting(index, self.clock + self.config.late, message, arrived))
        number, sent = of.last.number + len(self.under_way), bytes_of(message)
        gate()
        of.post(number, sent)  # the message counts once it is at the rendezvous
        self._figures.wait_s += time.perf_counter() - began
        return None

    def _take(self) -> None:
        """End the oldest pending meeting; join again if the others held it without this island.

        1. Read the decision on who is present.
        2. Fetch the messages of present islands, and apply their mean.
        3. Give the state to joining islands.
        """
        of, began, meeting = self.membership, time.perf_counter(), self.under_way[0]
        # 1
        roster = of.decide()
        # 2
        rows = self._rows(roster, meeting.index) if of.own in roster.present else None
        self._figures.wait_s += time.perf_counter() - began
        if rows is None:
            self.progress.give_up()
            of.come_back(self._has_state)
            self._post_under_way()
            return
        self.under_way.pop(0)
        good = {island: row for island, row in rows.items() if isinstance(row, Tensor)}
        self._arrived(meeting.index, good, of.own in rows and of.own not in good)
        # 3
        of.held(roster, {one: what for one, what in rows.items() if isinstance(what, str)})
        self._count_islands()
        if roster.giver == of.own:
            self._give(roster)

    def _kept(self) -> Callable[[], object]:
        """Return a callback that restores this island's position in the run, to try again."""
        of = self.membership
        before = of.last, of.own, of.left_out, of.joined

        def put_back() -> None:
            of.last, of.own, of.left_out, of.joined = before

        return put_back

    def _rows(self, roster: Roster, index: int) -> dict[str, Tensor | str] | None:
        """Return each island's message, or why it does not count; the same result in all islands.

        Islands that joined after the meeting began have sent none. Returns None if a rank of this
        island was too late for one of the messages; then this island is left out.
        """
        like, found, squares = self.parts[index].fragment.start, {}, {}
        for island in roster.present:
            data = self._message_of(island, roster.number)
            if data is None:
                break
            found[island] = torch.zeros_like(like)
            if data:
                squares[island] = island_payloads.unpack(self._channel, data, found[island])
        there = len(found) == len(roster.present)
        flags = [there, *(bool(row.isfinite().all()) for row in found.values())]
        flags += [True] * (1 + len(roster.present) - len(flags))
        least = small_messages.least(like.new_tensor(flags, dtype=torch.int32)).tolist()
        if not least[0]:
            return None
        finite = dict(zip(found, map(bool, least[1:]), strict=True))
        bad = unfit(
            list(squares), [finite[square] for square in squares],
            lambda: like.new_tensor(list(squares.values()), dtype=torch.float64),
            self.config.outlier, None,
        )  # fmt: skip
        return {square: bad.get(square, found[square]) for square in squares}

    def _message_of(self, island: str, number: int) -> bytes | bytearray | None:
        """Return an island's message for the first pending meeting; None: the store lost it."""
        if island == self.membership.own:
            return self.under_way[0].rows.cpu().numpy().tobytes()
        return self.membership.transfer.take(number, island)

    def _arrived(self, index: int, rows: Mapping[str, Tensor], bad: bool) -> None:
        """Apply the mean of ``rows``.

        ``bad``: this island's message does not count, and it returns to the others' weights.
        """
        part, own = self.parts[index], self.membership.own
        fragment = part.fragment
        lost = bad and fragment.under_way[0].message is not None
        if rows:
            self._figures.meetings += 1
            self._figures.drift += drift_of(torch.stack(list(rows.values())), fragment.start)
            place = list(rows).index(own) if own in rows else -1
            now = self.masters.read(part.low, part.high, part.numel)
            self._write(index, fragment.arrive(list(rows.values()), place, now))
        else:
            self._figures.skipped += 1
            fragment.skip()
        if lost:
            self._fall_back(True)

    # state

    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, of plain types and CPU tensors; None before the first step."""
        if self._masters is None:
            return None
        found = state_of(self.progress, self.masters.digest, islands=1, index=0)
        of = self.membership
        return {**found, "run": of.run, "meeting": of.last.number, "late": self.config.late}

    def save(self, folder: Path) -> None:
        """Write this rank's state into ``folder``, which no other island has written to."""
        problem = None
        if not dist.get_rank():
            _, problem = saved.attempt(functools.partial(self.claim, folder))
        saved.all_well(problem, WHAT)
        super().save(folder)

    def claim(self, where: Path | str) -> None:
        """Claim ``where``, a folder or a URL, for this island's checkpoints. No collective.

        Raises CheckpointError if another island of the run has claimed it.
        """
        if self._membership is None:
            return
        if isinstance(where, Path):
            claim(where, self._membership.run, self._membership.name)
        else:
            claim_url(where, self._membership.meet.line, self._membership.name)
