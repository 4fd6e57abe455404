"""Follow optimizer steps, and hold the islands' meetings that are due.

Every fragment has a meeting each ``every`` steps; the fragments take turns. A meeting has two
halves:

1. ``_send``: each rank sends the weight change of its part of the fragment to the ranks with its
   index in other islands, by an all-gather through the channel of ``sync``.
2. ``_take``, at once, ``delay`` steps or ``staleness`` meetings later: if all values are finite and
   no island is an outlier, the outer optimizer applies the mean, and the engine's weights are set.

If a mean is taken later, each rank also sends a flag that says whether the values of its message
are finite, so that no rank waits for another rank's last step when taking the mean (no codec turns
finite values into Inf). A rank that fails to make its message sends zeros and a flag of the
failure, and all ranks skip the meeting. If the mean is taken at once, the ranks of an island
compare the messages that they received; all islands read the same messages, so all decide alike.

Both halves run in the same order on all ranks. The clock counts every requested optimizer step,
even skipped ones, so that an overflow in one island shifts no meeting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import AllGather, Channel
from hybridcomp.job import small_messages
from hybridcomp.job.agreement import agree
from hybridcomp.job.gates import here
from hybridcomp.sync.checkpoint_state import state_of, taken_over
from hybridcomp.sync.exact_sends import broadcast, start_gather
from hybridcomp.sync.islands import Islands
from hybridcomp.sync.master_weights import Masters
from hybridcomp.sync.outliers import unfit
from hybridcomp.sync.progress import Meeting, Part
from hybridcomp.sync.sync_follower import SyncFollower, drift_of

#: flag of a message that rank 0 could not make; for rank r the flag is this minus r
FAILED = -1
GOES_BACK = ", and whoever did goes back to the weights that all agreed on last"


class IslandMeetings(SyncFollower):
    """Meetings of the islands of one job; all ranks of the job call it at the same steps.

    Meetings begin before the first step, after any checkpoint was loaded: all islands then take the
    first island's weights, unless the checkpoint had the state of meetings.
    """

    def __init__(
        self,
        channel: Channel,
        islands: Islands,
        make: Callable[[], Masters],
        say: Callable[..., object],
    ) -> None:
        """Prepare for meetings of the job's ``islands``; see ``SyncFollower``."""
        super().__init__(channel, make, say)
        self.islands, self._inside = islands, islands.inside

    # beginning

    def _begin(self) -> None:
        masters, islands = self.masters, self.islands
        self._channel.state.islands = len(islands.rows)
        self._agree()
        self._cut(islands.inside)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            problem = taken_over(loaded, self.progress, islands, masters.digest)
            if problem is None:
                return
            self._say(f"sync: {problem}; the islands begin anew with the weights of the first")
        self._level()

    def _level(self) -> None:
        """Copy the first island's weights to all islands."""
        source = self.islands.rows[0][self.islands.place]
        for index, part in enumerate(self.parts):
            fragment = part.fragment
            broadcast(fragment.start, source, self.islands.peers)
            if fragment.rule.keeps_progress:
                fragment.base = fragment.start.clone()
            self._write(index, fragment.start)

    def _agree(self) -> None:
        """Check that all ranks agree on islands and block, and ranks of one index on weights."""
        islands = self.islands
        facts: dict[str, Any] = {
            f"compression.sync.{name}": value for name, value in self.config.agreed().items()
        }
        facts |= {"islands": [list(row) for row in islands.rows]}
        agree(facts, what="islands")
        digest = {"weights": self.masters.digest, "elements": self.masters.numel}
        peers = [row[islands.place] for row in islands.rows]
        agree(digest, what="weights of the islands", ranks=peers)

    def _island(self) -> str | None:
        return None if self.islands.place else str(self.islands.index)

    # meetings

    def _send(self, index: int) -> Exception | None:
        part, masters, group = self.parts[index], self.masters, self.islands.peers
        problem: Exception | None = None
        if self.config.late:
            message, problem = self._message_or_nothing(part)
        else:
            masters.check()
            message = part.fragment.send(masters.read(part.low, part.high, part.numel))
        rows = message.new_empty(len(self.islands.rows) * part.numel)

        def native() -> Callable[[], Any]:
            for operation in here.operations:
                operation.before_message()
            return start_gather(rows, message, group).wait

        wait = self._channel.run(
            AllGather(
                numel=part.numel, dtype=message.dtype, group=group, shard=message, out=rows,
                async_op=True,
            ),
            native=native, encoded=lambda handle: handle.wait,
        )  # fmt: skip
        self._figures.ahead = max(self._figures.ahead, len(part.fragment.under_way) - 1)
        due, finite = self.clock + self.config.late, None
        if self.config.late:
            flags = message.new_ones(len(self.islands.rows), dtype=torch.int32)
            flags[self.islands.index] = _finite(message[None])[0]
            if problem is not None:
                flags[self.islands.index] = FAILED - dist.get_rank()
            finite = small_messages.start_least(flags)
        self.under_way.append(Meeting(index, due, rows, wait, finite))
        return problem

    def _message_or_nothing(self, part: Part) -> tuple[Tensor, Exception | None]:
        """Return this rank's message; on failure, zeros and the error. No communication.

        The error's flag makes all islands skip the meeting, since this rank's values are missing.
        """
        before = replace(part.fragment, under_way=part.fragment.under_way.copy())
        try:
            self.masters.check()
            now = self.masters.read(part.low, part.high, part.numel)
            return part.fragment.send(now), None
        except Exception as problem:
            part.fragment = before
            before.listen()
            return torch.zeros_like(before.start), problem

    def _take(self) -> None:
        """End the first pending meeting."""
        meeting, began = self.under_way.pop(0), time.perf_counter()
        part = self.parts[meeting.index]
        meeting.wait()
        rows = meeting.rows.view(len(self.islands.rows), part.numel)
        flags = self._flags(meeting, rows)
        failed = {island: FAILED - flag for island, flag in enumerate(flags) if flag < 0}
        bad = unfit(
            range(len(rows)), [flag > 0 for flag in flags],
            lambda: torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square(),
            self.config.outlier, self.islands.inside,
        )  # fmt: skip
        self._figures.wait_s += time.perf_counter() - began
        now = self.masters.read(part.low, part.high, part.numel)
        if not bad:
            self._figures.meetings += 1
            self._figures.drift += drift_of(rows, part.fragment.start)
            new = part.fragment.arrive(rows.unbind(), self.islands.index, now)
            self._write(meeting.index, new)
            return
        bad |= {island: f"sent nothing, as rank {rank} failed" for island, rank in failed.items()}
        own = self.islands.index
        lost = own in bad and own not in failed and part.fragment.under_way[0].message is not None
        part.fragment.skip()
        self._figures.skipped += 1
        self._say(
            f"sync: step {self.clock}: {', '.join(f'island {one} {bad[one]}' for one in bad)}; all "
            f"skip this meeting of fragment {meeting.index}"
            + ("" if failed.keys() >= bad.keys() else GOES_BACK)
        )
        self._fall_back(lost)

    @property
    def _gates(self) -> bool:
        """Return whether ranks may wait for each other: only if the mean is taken at once."""
        return not self.config.late

    def _kept(self) -> Callable[[], object]:
        """Return a callback that gives up the meeting: its messages cannot be received again."""
        return (lambda: self.progress.give_up()) if self._gates else super()._kept()

    def _flags(self, meeting: Meeting, rows: Tensor) -> list[int]:
        """Return per island 1 if all its ranks' messages are finite, else 0.

        A negative value is FAILED minus the rank of the job that could not make its message.
        """
        if meeting.finite is not None:
            found = meeting.finite()
        else:
            found = small_messages.least(_finite(rows).to(torch.int32), self.islands.inside)
        return [int(flag) for flag in found.tolist()]

    # state

    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, of plain types and CPU tensors; None before the first step.

        Waits for pending messages in order; a collective.
        """
        if self._masters is None:
            return None
        for meeting in self.under_way:
            meeting.wait()
        count, index = len(self.islands.rows), self.islands.index
        return state_of(self.progress, self.masters.digest, count, index)


def _finite(rows: Tensor) -> Tensor:
    """Return per row whether all values are finite, as a boolean tensor; does not wait.

    Inf and NaN times 0 are NaN: a tenth of the time of ``isfinite`` and ``all``.
    """
    return (rows * 0).sum(dim=1).isfinite()
