"""Follow the loss scale of an attached model, which is also the unit of its residuals.

A loss scaler becomes known with its first step. If ``GradScaler.update`` changes the scale,
residuals change with it (``steps``). If the scaler has its own ``update`` (``ShardedGradScaler``),
its scale is read before the first message of every step. After a restart the scale of the process's
scaler is read before the first message: if it differs from the saved scale, loaded residuals are
multiplied by the ratio.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from hybridcomp.log import say_once as say

SEVERAL = (
    "this process has several GradScalers, so which one scales the loss of the model is not known: "
    "residuals stay in the units in which they were saved; pass loss_scale to hybridcomp.load_state"
)


class LossScale:
    """The loss scale of one attached model.

    Attributes:
        value: the factor on the gradients, in whose units residuals are; 1.0 without a scaler.
        is_known: whether ``value`` comes from a scaler or from the caller of ``load``.
    """

    def __init__(self, rescale: Callable[[float], None]) -> None:
        """``rescale(factor)``: multiplies the residuals."""
        self.value, self.is_known = 1.0, False
        self._rescale = rescale
        self._scaler: weakref.ref[Any] | None = None
        self._asks = self._is_resumed = False

    def follow(self, scaler: Any) -> None:
        """Record that ``scaler`` steps an optimizer of the model."""
        self._scaler, self.is_known = weakref.ref(scaler), True
        # otherwise ``steps`` reports its changes
        self._asks = not hasattr(type(scaler).update, "__wrapped__")
        if self._asks:
            self.value = float(scaler.get_scale())

    def change(self, before: float, after: float) -> None:
        """Record that the scale changed from ``before`` to ``after``; multiply the residuals."""
        self.value = after
        if after != before:
            self._rescale(after / before)

    def load(self, saved: float | None, is_known: bool, given: float | None) -> None:
        """Continue with residuals that were saved at the scale ``saved``; None: scale not known.

        ``is_known``: the saved ``is_known``. ``given``: the scale from now on; None: the scale of
        this process's scaler; without a scaler 1.0 if ``is_known``, else ``saved``.
        """
        if saved is None:
            return
        self.value, self.is_known = saved, is_known
        self._is_resumed = given is None
        if given is not None:
            self.change(saved, given)
            self.is_known = True

    def before_messages(self) -> None:
        """Read the scale from the scaler before the first message of a step takes residuals."""
        if self._is_resumed:
            self._is_resumed = False
            self._look()
        elif self._asks and self._scaler is not None and (scaler := self._scaler()) is not None:
            self.change(self.value, float(scaler.get_scale()))

    def _look(self) -> None:
        """Multiply loaded residuals to match the loss scale of this process."""
        found = [held for held in gc.get_objects() if issubclass(type(held), GradScaler)]
        scales = {float(one.get_scale()) for one in found if one.is_enabled()}
        if len(scales) > 1:
            say(SEVERAL)
        elif scales or self.is_known:
            self.change(self.value, scales.pop() if scales else 1.0)
