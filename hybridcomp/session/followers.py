"""Followers: objects called around the optimizer steps of a session, such as publishers."""

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
        """Prepare for the step; the weights are still those before it."""

    def after_step(self, step: int) -> None:
        """Do the follower's work after optimizer step ``step``."""

    def after_skip(self) -> None:
        """Do the follower's work after an optimizer step that was skipped for an overflow."""

    def row(self) -> Mapping[str, float] | None:
        """Return the follower's figures since the last call, equal on all ranks; None: no work."""

    def close(self) -> None:
        """Free its resources. No collective."""


class FollowerBase:
    """A ``StepFollower`` that does nothing: a base class for followers of single events."""

    def before_step(self) -> None: ...

    def after_step(self, step: int) -> None: ...

    def after_skip(self) -> None: ...

    def row(self) -> Mapping[str, float] | None:
        return None

    def close(self) -> None: ...


@runtime_checkable
class StatefulFollower(Protocol):
    """A follower with state that a restart continues; all ranks call its methods together."""

    @property
    def name(self) -> str:
        """The key of its state."""

    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, as plain types and CPU tensors; None before there is one."""

    def save(self, folder: Path) -> None:
        """Write every rank's state into ``folder``, next to a checkpoint."""

    def read(self, folder: Path) -> Sequence[Mapping[str, Any]]:
        """Read and check what ``save`` wrote; return it for ``resume``. A collective.

        Raises CheckpointError on every rank if any rank's file is damaged.
        """

    def check(self, entry: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless ``entry`` has the form that ``state`` returns.

        No collective.
        """

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the checked states that ``read`` returned; begin anew if no rank has one.

        Raises nothing. No collective.
        """


@runtime_checkable
class OverflowFollower(Protocol):
    """A follower that can name the island whose step an overflow has skipped."""

    def overflowed(self, loss_scale: float | None) -> str | None:
        """Return a sentence on the skipped step on one of the ranks that skipped it, else None.

        No collective. ``loss_scale``: loss scale of the next step; None: unknown.
        """


@runtime_checkable
class ToldFollower(Protocol):
    """Follower whose work the job's last line mentions."""

    def told(self) -> str:
        """Return words for the work since the run began ("published 3 versions"); "": none."""


class Followers(list[StepFollower]):
    """The followers of one session, called in the order in which they were added."""

    @property
    def stateful(self) -> list[StatefulFollower]:
        """Return the followers whose state belongs to a checkpoint."""
        return [follower for follower in self if isinstance(follower, StatefulFollower)]

    def before_step(self) -> None:
        for follower in self:
            follower.before_step()

    def after_step(self, step: int) -> None:
        """Call all followers after optimizer step ``step``, even if one of them fails.

        Raises the first error afterwards: a failed version is no reason to miss a meeting.
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
        self.overflowed(None)
        for follower in self:
            follower.after_skip()

    def overflowed(self, loss_scale: float | None) -> None:
        """Report which island's step an overflow skipped; arguments as in ``OverflowFollower``."""
        for follower in self:
            if isinstance(follower, OverflowFollower):
                sentence = follower.overflowed(loss_scale)
                if sentence is not None:
                    log.say(sentence, anywhere=True)

    def close(self) -> None:
        """Free the followers' resources, the last one first, even if one of them fails."""
        with ExitStack() as ends:
            for follower in self:
                ends.callback(follower.close)
            self.clear()
