"""Detect the steps of an optimizer that is no ``torch.optim.Optimizer`` and calls no hook.

At the next forward pass, a step has run if parameters were changed in place since the last pass, or
if their gradients are gone. If no step is detected, a message shows the user how to count steps:
otherwise ``start_step``, ramps and reports would silently stop.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from hybridcomp.channels.engine_state import UNCOUNTED
from hybridcomp.log import say_once as say

#: number of passes with reduced gradients but no step before the message; ``PATIENT`` if one of
#: torch's optimizers, whose steps call a hook, holds the parameters: the job may accumulate
PATIENCE, PATIENT = UNCOUNTED, 128
COUNTED = (
    "no torch.optim.Optimizer that calls torch's hooks holds the parameters of this model: a step "
    "is counted when the next forward pass finds them changed or their gradients gone; "
    "count_step() of what hybridcomp.attach gave, behind each update, counts it at once"
)
NOT_COUNTED = (
    "no optimizer step was seen in {} passes with reduced gradients, so none is counted, and "
    "start_step, ramps, reports, publish and sync stand still; where the optimizer is no "
    "torch.optim.Optimizer, call count_step() of what hybridcomp.attach gave behind each update"
)
LOCAL = (
    "optimizer steps without reduced gradients, as inside no_sync() or with "
    "set_requires_gradient_sync(False), are not counted: ranks may make different numbers of them; "
    "start_step, ramps, reports, publish and sync stand still"
)


class UnseenSteps:
    """Detector of steps, used until a ``torch.optim.Optimizer`` reports its first one."""

    def __init__(
        self, parameters: Callable[[], Iterable[Tensor]], owns: Callable[[Any], bool]
    ) -> None:
        """Watch ``parameters()``; ``owns(optimizer)`` returns whether an optimizer holds any."""
        self._parameters, self._owns = parameters, owns
        self._is_foreign: bool | None = None  # whether no torch optimizer holds any; None: unknown
        self._versions = 0

    def begin(self) -> None:
        """Record the versions of the parameters when their gradients are reduced."""
        self._versions = sum(map(_version, self._parameters()))

    def stepped_since_begin(self, passes: int, is_heard: bool) -> bool:
        """Return whether the optimizer has stepped since ``begin``.

        The first forward pass after a reduction calls it.

        ``passes``: number of passes with reduced gradients since the last step. ``is_heard``:
        whether a hook has reported a step of one of torch's optimizers before.
        """
        if is_heard:
            self._is_foreign = False
        elif self._is_foreign is None:
            self._is_foreign = not self._is_held()
        if self._is_foreign:
            trained = [p for p in self._parameters() if p.requires_grad]
            changed = sum(map(_version, self._parameters())) != self._versions
            if changed or all(parameter.grad is None for parameter in trained):
                say(COUNTED)
                return True
        if passes == (PATIENCE if self._is_foreign else PATIENT):
            say(NOT_COUNTED.format(passes))
        return False

    def _is_held(self) -> bool:
        """Return whether a ``torch.optim.Optimizer`` that calls hooks holds any parameter."""
        gc.collect()
        found = [held for held in gc.get_objects() if issubclass(type(held), Optimizer)]
        return any(self._owns(one) for one in found if hasattr(type(one).step, "hooked"))


def _version(parameter: Any) -> int:
    """Return how often ``parameter``, or its base or local tensor, was changed in place."""
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return int(parameter._version) + int(local._version)
