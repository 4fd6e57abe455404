"""Compare, before every optimizer step, which parameters require gradients.

An optimizer is built for the parameters that require gradients at that time. If a parameter stops
or begins to require them later, its treatment depends on the engine, and no engine prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hybridcomp import log
from hybridcomp.session.followers import FollowerBase

#: most names in a message
SHOWN = 3


class TrainedSet:
    """The parameters of a model, and which of them required gradients at the last check.

    Attributes:
        first: names of the parameters that required gradients at the first check.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named = dict(named)
        self._held = self._now()
        self.first = self._trained()
        self._told: set[str] = set()

    def _now(self) -> list[bool]:
        return [one.requires_grad for one in self._named.values()]

    def _trained(self) -> frozenset[str]:
        return frozenset(name for name, one in self._named.items() if one.requires_grad)

    def look(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the parameters that stopped and those that began to require gradients.

        None if nothing has changed. A check takes about 50 nanoseconds per parameter.
        """
        before, now = self._held, self._now()
        if now == before:
            return None
        self._held = now
        both = zip(self._named.items(), before, now, strict=True)
        changed = [named for named, was, trains in both if was != trains]
        stopped = {name: one for name, one in changed if not one.requires_grad}
        return stopped, {name: one for name, one in changed if one.requires_grad}

    def accept(self) -> None:
        """Add the parameters that require gradients now to ``first``."""
        self._held = self._now()
        self.first |= self._trained()

    def tell(self, names: Iterable[str], verb: str, rest: str) -> None:
        """Print on this rank that parameters ``verb`` requiring gradients; each name once."""
        fresh = [name for name in names if name not in self._told]
        if not fresh:
            return
        self._told.update(fresh)
        count = f"{len(fresh)} parameter{'s' * (len(fresh) > 1)}"
        text = f"WARNING: {count} {verb} requiring gradients ({_listed(fresh)}){rest}"
        log.say(text, anywhere=True)


class TrainedFollower(FollowerBase):
    """Follower of a session that checks its model's ``TrainedSet`` before every step."""

    name = "trained set"

    def accept(self) -> None:
        """Accept the changes so far without a message: ``hybridcomp.freeze`` has made them."""
        raise NotImplementedError


def accept(followers: Iterable[object]) -> None:
    """Make the followers of a session accept the parameters that train now."""
    for follower in followers:
        if isinstance(follower, TrainedFollower):
            follower.accept()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
