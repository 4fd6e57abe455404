"""Followers: what else is done around the optimizer steps of a session, such as publishing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hybridcomp import log


class StepFollower(Protocol):
    """Called around every optimizer step, on all ranks together; may be a collective."""

    @property
    def name(self) -> str:
        """The key of its row in a report."""

    def before_step(self) -> None:
        """Prepare: the weights are those before the step."""

    def after_step(self, step: int) -> None:
        """Do what is due after optimizer step ``step``."""

    def after_skip(self) -> None:
        """Do what is due although the optimizer step was skipped for an overflow."""

    def row(self) -> Mapping[str, float] | None:
        """Return its figures since the last call, equal on all ranks; None: nothing was done."""

    def close(self) -> None:
        """Free what is held. No collective."""


@runtime_checkable
class StatefulFollower(Protocol):
    """A follower that a restart has to continue; all ranks call its methods together."""

    @property
    def name(self) -> str:
        """The key of its state."""

    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, of plain types and CPU tensors; None: nothing has begun."""

    def save(self, folder: Path) -> None:
        """Write the state of every rank beside a checkpoint."""

    def read(self, folder: Path) -> Sequence[Mapping[str, Any]]:
        """Return what ``save`` wrote, checked, for ``resume``; changes nothing. A collective.

        Raises CheckpointError, on every rank, where the file of any is damaged.
        """

    def check(self, entry: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless ``entry`` is what ``state`` returns. No collective."""

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the next step from checked states: this rank's, or its share of all.

        None of them on any rank: begin anew. Raises nothing. No collective.
        """


@runtime_checkable
class OverflowFollower(Protocol):
    """A follower that knows whose step an overflow has skipped."""

    def overflowed(self, loss_scale: float | None) -> str | None:
        """Return a sentence on a step that was skipped, on one of its ranks; else None.

        No collective. ``loss_scale``: of the next step; None: not known.
        """


@runtime_checkable
class ToldFollower(Protocol):
    """Follower whose work the job's last line tells."""

    def told(self) -> str:
        """Return what it has done since the run began, as "published 3 versions"; "": nothing."""


class Followers(list[StepFollower]):
    """The followers of one session, called in the order in which they were added."""

    @property
    def stateful(self) -> list[StatefulFollower]:
        """Return those whose state belongs to a checkpoint."""
        return [one for one in self if isinstance(one, StatefulFollower)]

    def before_step(self) -> None:
        """Call all of them while the weights are those before an optimizer step."""
        for follower in self:
            follower.before_step()

    def after_step(self, step: int) -> None:
        """Call all of them after optimizer step ``step``, the others where one fails.

        Raises the first error: a version that failed is no reason to miss a meeting.
        """
        errors = []
        for follower in self:
            try:
                follower.after_step(step)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def after_skip(self) -> None:
        """Tell all of them of a step that a loss scaler has skipped, which is not counted."""
        self.overflowed(None)
        for follower in self:
            follower.after_skip()

    def overflowed(self, loss_scale: float | None) -> None:
        """Say whose step an overflow has skipped; ``loss_scale``: as in ``OverflowFollower``."""
        for follower in self:
            if isinstance(follower, OverflowFollower):
                told = follower.overflowed(loss_scale)
                if told is not None:
                    log.say(told, anywhere=True)

    def close(self) -> None:
        """Free what they hold, the last one first, and the others where one fails."""
        with ExitStack() as ends:
            for follower in self:
                ends.callback(follower.close)
            self.clear()
