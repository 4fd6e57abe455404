"""Hold meetings with islands that are jobs of their own, which come and go.

Every ``every`` steps this job, one island, sends what its weights have moved, and takes the mean of
those islands that are there (``rendezvous``). Everybody who is present reads the same messages in
one order, so that start copies and momentum stay alike bit for bit. Nobody can stop a meeting:

* An island that has ended or hangs is left out after ``timeout_s``. If it comes back it finds
  itself left out; its work since the meeting before is lost.
* An island that comes takes start copies, momentum and the clock from a peer at a meeting, and
  meets with the others from the next one on. Where all come from checkpoints of one meeting, each
  goes on from its own, bit for bit.
* An island that sent NaN or Inf does not count, and goes back to the weights of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.errors import HybridcompError
from hybridcomp.job import small_messages
from hybridcomp.sync import island_payloads
from hybridcomp.sync.claimed_folders import claim
from hybridcomp.sync.island_facts import facts_of
from hybridcomp.sync.masters import Masters, cut
from hybridcomp.sync.membership import Membership
from hybridcomp.sync.progress import Part
from hybridcomp.sync.recurrence import Fragment
from hybridcomp.sync.rendezvous import Reached, Roster
from hybridcomp.sync.stored import entry_of_island, load_entry, state_of
from hybridcomp.sync.sync_follower import Figures, SyncFollower, drift_of, rule_of


class JobMeetings(SyncFollower):
    """Meetings with other jobs; all ranks of this job call it."""

    def __init__(
        self, channel: Channel, make: Callable[[], Masters], say: Callable[..., object]
    ) -> None:
        """Hold what meetings need; see ``SyncFollower``."""
        super().__init__(channel, make, say)
        assert self.config.jobs is not None, "the block was asked"
        self.jobs = self.config.jobs
        self._membership: Membership | None = None

    @property
    def membership(self) -> Membership:
        """Return the part that this island takes in the run, once meetings have begun."""
        assert self._membership is not None, "begun"
        return self._membership

    @property
    def part(self) -> Part:
        """Return this rank's part of the weights."""
        return self.progress.parts[0]

    # followers

    def before_step(self) -> None:
        """Join the others, before the first step; may wait for them."""
        if self._masters is None:
            self._masters = self._make()
            try:
                self._begin()
            except HybridcompError:
                self.close()
                raise

    def after_step(self, step: int) -> None:
        """Hold the meeting that is due after a step; ``step`` is not used, see the clock."""
        self.progress.clock += 1
        if self.clock % self.config.every == 0:
            self._meet()

    def row(self) -> dict[str, float] | None:
        """Return the figures since the last call; None where no meeting was held."""
        found, self._figures = self._figures, Figures()
        if not found.meetings + found.skipped:
            return None
        of = self.membership
        left_out, of.left_out, joined, of.joined = of.left_out, 0, of.joined, 0
        return {
            "meetings": float(found.meetings),
            "skipped": float(found.skipped),
            "meet_wait_ms": found.wait_s * 1e3,
            "drift": found.drift / max(1, found.meetings),
            "islands": float(len(of.last.members)),
            "left_out": float(left_out),
            "joined": float(joined),
        }

    def close(self) -> None:
        """Leave the run, so that nobody waits for this island, and free what is held."""
        if self._membership is not None:
            self._membership.leave()
        self._membership = None
        super().close()

    # coming

    def _begin(self) -> None:
        masters = self.masters
        ((low, high, numel),) = cut(masters.numel, 1, *masters.shares(None))
        start = masters.read(low, high, numel)
        self.progress.parts = [Part(low, high, numel, Fragment(rule_of(self.config), start))]
        facts = facts_of(self._channel, masters)
        self._membership = Membership(self.jobs, facts, self._say)
        self._membership.join(self._load(), self._has_state)

    def _load(self) -> Reached:
        """Load this island's own state from a checkpoint; return how far it had got."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return None
        entry = entry_of_island(loaded, self.progress, self.masters.digest)
        if entry is None:
            self._say(
                "sync: the checkpoint holds no state of this island, with as many ranks and the "
                "same weights; it takes that of a peer, or begins anew"
            )
            return None
        load_entry(entry, self.progress)
        return str(entry["run"]), int(entry["meeting"])

    def _has_state(self, roster: Roster) -> bool:
        """Get the state after the meeting at which this island joins; False where none comes."""
        own, giver = self.membership.own, roster.giver
        reached = roster.joining[own]
        if giver == own:
            if any(one is None or one != reached for one in roster.joining.values()):
                self._give(roster)
            return True
        if reached is not None and roster.joining.get(giver) == reached:
            return True  # all come from one meeting, and this island goes on from its own state
        data = self.membership.meet.take(roster.number)
        there = self.part.fragment.start.new_tensor([data is not None], dtype=torch.int32)
        if not int(small_messages.least(there)) or data is None:
            return False
        state = island_payloads.unpack_state(data)
        part, like = self.part, self.part.fragment.start
        part.fragment = Fragment(part.fragment.rule, state["start"].to(like))
        if state["momentum"] is not None:
            part.fragment.momentum = state["momentum"].to(like)
        self.progress.clock = int(state["clock"])
        self._write(part.fragment.start)
        return True

    def _give(self, roster: Roster) -> None:
        fragment, momentum = self.part.fragment, self.part.fragment.momentum
        state = {
            "start": fragment.start.cpu(),
            "momentum": None if momentum is None else momentum.cpu(),
            "clock": self.clock,
        }
        self.membership.meet.give(roster.number, island_payloads.pack_state(state))

    # meetings

    def _meet(self) -> None:
        """Hold a meeting; join again where it was held without this island.

        1. Post what this rank's part has moved; once all ranks have, the island stands.
        2. Take the decision: who is present.
        3. Take the messages of those, and the mean.
        4. Give the state to who joins.
        """
        of, part, began = self.membership, self.part, time.perf_counter()
        own, last = of.own, of.last
        now = self.masters.read(part.low, part.high, part.numel)
        # 1
        message = island_payloads.pack(self._channel, part.fragment.send(now))
        of.meet.post(own, last.number + 1, message)
        small_messages.wait_for_all()
        if not of.meet.place:
            of.meet.stand(own, last.number + 1)
        # 2
        roster = of.meet.decide(last, own)
        # 3
        rows = self._rows(roster) if own in roster.present else None
        self._figures.wait_s += time.perf_counter() - began
        if rows is None:
            part.fragment.skip()
            of.come_back(self._has_state)
            return
        good = {island: row for island, row in rows.items() if row is not None}
        self._take(good, now)
        # 4
        if roster.giver == own:
            self._give(roster)
        of.held(roster, [island for island in rows if island not in good])

    def _rows(self, roster: Roster) -> dict[str, Tensor | None] | None:
        """Return the messages by island, None for one with NaN or Inf, the same in all islands.

        None where a rank of this island came too late for one of them: it is left out then.
        """
        like, found = self.part.fragment.start, {}
        for island in roster.present:
            data = self.membership.meet.message_of(island, roster.number)
            if data is None:
                break
            found[island] = torch.empty_like(like)
            island_payloads.unpack(self._channel, data, found[island])
        there = len(found) == len(roster.present)
        flags = [there, *(bool(row.isfinite().all()) for row in found.values())]
        flags += [True] * (1 + len(roster.present) - len(flags))
        least = small_messages.least(like.new_tensor(flags, dtype=torch.int32)).tolist()
        if not least[0]:
            return None
        finite = zip(found.items(), least[1:], strict=True)
        return {island: row if well else None for (island, row), well in finite}

    def _take(self, rows: Mapping[str, Tensor], now: Tensor) -> None:
        """Take the mean of ``rows``; without a row of its own go back to the others' weights."""
        fragment, own = self.part.fragment, self.membership.own
        if rows:
            self._figures.meetings += 1
            self._figures.drift += drift_of(torch.stack(list(rows.values())), fragment.start)
            index = list(rows).index(own) if own in rows else -1
            new = fragment.arrive(list(rows.values()), index, now)
        else:
            self._figures.skipped += 1
            fragment.skip()
        if own not in rows:
            new = fragment.fall_back()
        self._write(new)

    def _write(self, values: Tensor) -> None:
        """Put this rank's part into its weights; where all ranks hold all, also the others'."""
        self.masters.write_part(self.part, values, (0, self.masters.numel), None)
        self.masters.written()

    # state

    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, of plain types and CPU tensors; None before the first step."""
        if self._masters is None:
            return None
        found = state_of(self.progress, self.masters.digest, islands=1, index=0)
        return {**found, "run": self.membership.run, "meeting": self.membership.last.number}

    def save(self, folder: Path) -> None:
        """Write this rank's state into ``folder``, which no other island has written to."""
        if self._membership is not None:
            claim(folder, self._membership.run, self._membership.name)
        super().save(folder)
