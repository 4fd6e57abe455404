"""Detect parameters of a model that are frozen or unfrozen during training.

Optimizers of torch skip parameters without a gradient, so a frozen parameter changes only if its
last gradient, or zeros, remain in place. An unfrozen parameter is trained if an optimizer holds it,
but DistributedDataParallel averages only gradients of parameters that required them when the model
was wrapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hybridcomp.patches.common.trained_set import TrainedFollower, TrainedSet
from hybridcomp.patches.torch.attached import Attached

MOVES = (
    ", but still have one, so their optimizer goes on changing them, at least by momentum and "
    "weight decay: zero_grad(set_to_none=False) leaves zeros there; set their grad to None"
)
NOT_AVERAGED = (
    " that did not when the model was attached: DistributedDataParallel does not average their "
    "gradients, so the ranks' copies drift apart; wrap the model anew, and attach it"
)
NOT_HELD = ", but no optimizer that steps holds them, so they stay as they are; give them to one"


def watch(attached: Attached, named: Iterable[tuple[str, Tensor]], *, averages_all: bool) -> None:
    """Check the parameters ``named`` before every step of ``attached``.

    ``averages_all``: whether the engine also averages gradients of parameters unfrozen later.
    """
    attached.session.follow(_Model(attached, TrainedSet(named), averages_all))


class _Model(TrainedFollower):
    """Follower that checks the effects of a step before the next one."""

    def __init__(self, attached: Attached, trained: TrainedSet, averages_all: bool) -> None:
        self._attached = weakref.ref(attached)
        self._trained, self._averages_all = trained, averages_all
        self._stopped: dict[str, Tensor] = {}
        self._begun: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Check which parameters train, and print what has changed."""
        if self._stopped or self._begun:
            self._judge()
        changed = self._trained.look()
        if changed is None:
            return
        self._stopped, self._begun = changed
        if not self._averages_all:
            later = [name for name in self._begun if name not in self._trained.first]
            self._trained.tell(later, "began", NOT_AVERAGED)

    def accept(self) -> None:
        """Accept all parameters as they are."""
        self._stopped, self._begun = {}, {}
        self._trained.accept()

    def _judge(self) -> None:
        """Print what the step after a change did to the changed parameters."""
        stopped = [
            n for n, p in self._stopped.items() if not p.requires_grad and p.grad is not None
        ]
        self._trained.tell(stopped, "stopped", MOVES)
        attached: Any = self._attached()
        if attached is not None and (held := attached.held()):
            begun = [n for n, p in self._begun.items() if p.requires_grad and id(p) not in held]
            self._trained.tell(begun, "began", NOT_HELD)
        self._stopped, self._begun = {}, {}
