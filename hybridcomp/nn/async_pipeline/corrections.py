"""Correct an optimizer's update for late gradients, by hooks around its ``step``.

Each correction works on the optimizer's own tensors, element by element, in hooks around ``step``,
so corrections that only change the update also work on master weights and their partitions. A
correction keeps its own tensors in the optimizer's state, under ``KEY``, so that they are saved and
restored with that state.

With w_t the weights after t steps, U_t the uncorrected update that step t subtracts, and D the
average number of steps by which this stage's gradients are late:

* ``error_feedback``: w_{t+1} = w_t - (2 U_t - U_{t-1}). The previous step applied U_{t-1} although
  U_t was due; as soon as U_t is known, this step also applies the difference. For a delay of one
  step, as in "One-Step Gradient Delay is Not a Barrier" (Zmushko et al., 2026).
* ``look_ahead``: w_{t+1} = w_t + d_t - (1 - g) U_t, with d_t = g (w_t - w_{t-1}) and gradients at
  w_t + d_t ("Nesterov Method for Asynchronous Pipeline Parallel Optimization", Ajanthan et al.,
  2025). The parameters hold w_t + d_t, as those of torch's Nesterov do.
* ``pipemare``: the learning rate is divided by max(D, 1) ** (1 - k / anneal) in step k (T1), and
  passes backward compute with w_t - D delta_t (T2), delta_{t+1} = y delta_t +
  (1 - y) (w_{t+1} - w_t), y = decay ** (1 / D) ("PipeMare", Yang et al., 2021).
* ``spike``: w_{t+1} = w_t - lr (a v_{t+1} + b g_t), a = m ** D, b = (1 - m ** D) / (1 - m), for SGD
  of momentum m and velocity v; passes forward compute with w_t - lr D v_t ("Pipelined
  Backpropagation at Scale", Kosson et al., 2021: SC_D and LWPv_D).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.errors import ConfigError

#: key in the optimizer's state of a parameter
KEY = "hybridcomp_correction"
#: name of the setting in messages
NAME = "compression.pipeline.correction"


class UpdateCorrection(ABC):
    """Hooks around the ``step`` of ``optimizer``; each correction implements some of the hooks.

    The hooks act only inside ``active``, so the same optimizer can also step without a correction.
    """

    #: whether passes need optimizer tensors that are the model's own parameters
    needs_own_weights = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._is_active = False
        self._before: dict[Tensor, Tensor] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._pre),
            optimizer.register_step_post_hook(self._post),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Apply the correction to all steps inside this context."""
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False
            self._before.clear()

    def _pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_active:
            self._before = {p: p.detach().clone() for p in self._stepping()}
            self.before()

    @torch.no_grad()
    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_active:
            self.after()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in self._before:
                        self.update(parameter, self._before[parameter], group)
            self._before.clear()

    def _stepping(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from (p for p in group["params"] if p.grad is not None)

    def before(self) -> None:  # noqa: B027
        """Prepare a step; the weights are still those before it."""

    def after(self) -> None:  # noqa: B027
        """Undo the changes of ``before``."""

    @abstractmethod
    def update(self, parameter: Tensor, before: Tensor, group: dict[str, Any]) -> None:
        """Correct one parameter in place after the step; ``before``: its values before the step."""

    def forward_weights(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the weights for a forward pass; None: use the pass's weight version."""
        return None

    def backward_weights(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the weights for a backward pass; None: use the pass's weight version."""
        return None

    def kept(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor kept for ``parameter``; None before the first step."""
        state = self.optimizer.state.get(parameter, {})
        state_of_key: Tensor | None = state.get(KEY)
        return state_of_key

    def keep(self, parameter: Tensor, values: Tensor) -> None:
        self.optimizer.state[parameter][KEY] = values


class UpdateErrorFeedback(UpdateCorrection):
    """Add to each update its difference from the previous, late update."""

    def update(self, parameter: Tensor, before: Tensor, group: dict[str, Any]) -> None:
        """Subtract U_t - U_{t-1} once more."""
        late, last = before - parameter, self.kept(parameter)
        if last is not None:
            parameter.sub_(late - last)
        self.keep(parameter, late)


class LookAhead(UpdateCorrection):
    """Nesterov's look-ahead with a discounted gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, momentum: float) -> None:
        super().__init__(optimizer)
        self._momentum = momentum

    def update(self, parameter: Tensor, before: Tensor, group: dict[str, Any]) -> None:
        """Compute the next weights, and set the parameter to the prediction ahead of them."""
        last = self.kept(parameter)
        weights = torch.lerp(before, parameter.detach(), 1 - self._momentum)
        ahead = weights - (before if last is None else last)
        parameter.copy_(weights + self._momentum * ahead)
        self.keep(parameter, weights)


class PipeMare(UpdateCorrection):
    """Reduce learning rates early in training, and extrapolate weights back in time (T1, T2)."""

    needs_own_weights = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        delay: Callable[[], float],
        settings: AsyncPipelineConfig,
        step: Callable[[], int],
    ) -> None:
        super().__init__(optimizer)
        self._delay, self._anneal, self._step = delay, settings.anneal, step
        self._decay = settings.decay
        self._rates: list[float] = []

    def before(self) -> None:
        """Divide the learning rates (T1)."""
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        power = 1 - min(self._step() / self._anneal, 1) if self._anneal else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] / max(self._delay(), 1.0) ** power

    def after(self) -> None:
        """Restore the schedule's learning rates."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def update(self, parameter: Tensor, before: Tensor, group: dict[str, Any]) -> None:
        """Add the step to the trend of the weights (T2)."""
        moved, trend, delay = parameter - before, self.kept(parameter), self._delay()
        trend = torch.zeros_like(moved) if trend is None else trend
        left = self._decay ** (1 / delay) if delay else 0.0
        self.keep(parameter, left * trend + (1 - left) * moved)

    def backward_weights(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the weights moved back along their trend by the delay of the gradients."""
        delay = self._delay()
        if not delay:
            return None
        trends = [self.kept(p) for p in parameters]
        pairs = zip(parameters, trends, strict=True)
        return [p.data if t is None else p.data - delay * t for p, t in pairs]


class SpikeCompensation(UpdateCorrection):
    """Correct momentum SGD for delayed gradients; predict forward weights by the velocity."""

    needs_own_weights = True

    def __init__(self, optimizer: torch.optim.Optimizer, delay: Callable[[], float]) -> None:
        for group in optimizer.param_groups:
            plain = not (group.get("dampening") or group.get("nesterov") or group.get("maximize"))
            if not isinstance(optimizer, torch.optim.SGD) or not group["momentum"] or not plain:
                todo = "it needs SGD with momentum, without dampening and nesterov"
                raise ConfigError(NAME, "spike", todo)
        super().__init__(optimizer)
        self._delay = delay

    def update(self, parameter: Tensor, before: Tensor, group: dict[str, Any]) -> None:
        """Replace the step: weigh velocity and newest gradient (with weight decay) by a and b."""
        velocity, momentum = self.optimizer.state[parameter]["momentum_buffer"], group["momentum"]
        assert parameter.grad is not None, "of a parameter that steps"
        grad = parameter.grad + group["weight_decay"] * before
        part = momentum ** self._delay()
        spread = (1 - part) / (1 - momentum)
        parameter.copy_(before - group["lr"] * (part * velocity + spread * grad))

    def forward_weights(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the weights expected at the backward pass if the velocity does not change."""
        delay = self._delay()
        if not delay:
            return None
        rates = {p: g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        predicted = []
        for parameter in parameters:
            velocity = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            data = parameter.data
            step = 0 if velocity is None else delay * rates[parameter] * velocity
            predicted.append(data - step)
        return predicted


def make_correction(
    settings: AsyncPipelineConfig,
    optimizer: torch.optim.Optimizer,
    delay: Callable[[], float],
    step: Callable[[], int],
) -> UpdateCorrection | None:
    """Return the correction of ``settings`` for a stage whose gradients are ``delay()`` steps late.

    ``step`` returns the number of flushless steps so far. Returns None for no correction. Raises
    ConfigError if the correction does not support this optimizer.
    """
    if settings.correction == "error_feedback":
        return UpdateErrorFeedback(optimizer)
    if settings.correction == "look_ahead":
        return LookAhead(optimizer, settings.momentum)
    if settings.correction == "pipemare":
        return PipeMare(optimizer, delay, settings, step)
    if settings.correction == "spike":
        return SpikeCompensation(optimizer, delay)
    return None
