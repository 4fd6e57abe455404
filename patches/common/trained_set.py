"""Which parameters require gradients, compared before every optimizer step.

An optimizer is built for those that require them then. What becomes of one that stops, or begins,
in the middle of a training depends on the engine, and none says anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from torch import Tensor

from hybridcomp import log

#: names in a message
SHOWN = 3

_flag: Callable[[Tensor], bool] = attrgetter("requires_grad")


class TrainedSet:
    """The parameters of a model, and which of them required gradients at the last look.

    Attributes:
        first: the names of those that required gradients at the first look.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        every = dict(named)
        self._names, self._parameters = list(every), list(every.values())
        self._flags = self._now()
        self.first = frozenset(name for name, one in every.items() if one.requires_grad)
        self._told: set[str] = set()

    def _now(self) -> bytes:
        return bytes(map(_flag, self._parameters))

    def look(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the parameters that have stopped requiring gradients since, and that have begun.

        None where nothing has changed: 30 nanoseconds a parameter.
        """
        flags = self._now()
        if flags == self._flags:
            return None
        before, self._flags = self._flags, flags
        stopped: dict[str, Tensor] = {}
        begun: dict[str, Tensor] = {}
        for place, (was, now) in enumerate(zip(before, flags, strict=True)):
            if was != now:
                (begun if now else stopped)[self._names[place]] = self._parameters[place]
        return stopped, begun

    def tell(self, names: Iterable[str], verb: str, rest: str) -> None:
        """Say on this rank that parameters ``verb`` requiring gradients; each name once."""
        fresh = [name for name in names if name not in self._told]
        if not fresh:
            return
        self._told.update(fresh)
        count = f"{len(fresh)} parameter{'s' * (len(fresh) > 1)}"
        told = f"WARNING: {count} {verb} requiring gradients ({_listed(fresh)}){rest}"
        log.say(told, anywhere=True)


class TrainedFollower:
    """A follower of a session that looks at its model's ``TrainedSet`` before every step."""

    name = "trained set"

    def before_step(self) -> None:
        """Look, and say what has changed."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def after_skip(self) -> None:
        """Do nothing."""

    def row(self) -> Mapping[str, float] | None:
        """Return no figures."""
        return None

    def close(self) -> None:
        """Do nothing."""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
