"""Simulate flushless pipelines in one process, in fp64, from the papers' formulas.

Stage s of S multiplies tanh of its input by its weight; w[s][t] is that weight after t steps. There
are no passes or messages: micro-batch m belongs to step t = m // M, and its forward pass through
stage s uses the weights of step max(0, (m - d) // M), with d = (S - 1 - s) (1 + slack).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.training.async_trainer import AsyncJob, micro_batch, weight

Gradients = list[Tensor]


def gradients(index: int, forward: Sequence[Tensor], backward: Sequence[Tensor]) -> Gradients:
    """Return a micro-batch's gradients by the chain rule, with given weights in backward."""
    values, targets = micro_batch(index)
    squashed = []
    for matrix in forward:
        squashed.append(torch.tanh(values))
        values = squashed[-1] @ matrix.T
    grad = 2 * (values - targets) / values.numel()
    grads = []
    for hidden, matrix in zip(reversed(squashed), reversed(backward), strict=True):
        grads.append(grad.T @ hidden)
        grad = (grad @ matrix) * (1 - hidden**2)
    return grads[::-1]


class Simulation:
    """Weights of all stages and steps; subclasses choose the gradients' weights and the update."""

    def __init__(self, job: AsyncJob, stages: int) -> None:
        self.job, self.stages, self.rate = job, stages, job.rate
        self.count = job.micro_batches
        self.weights = [[weight(stage)] for stage in range(stages)]
        each = 1 + int((job.pipeline or {}).get("slack", 0))
        self.lead: list[int] = [(stages - 1 - s) * each for s in range(stages)]
        self.delays: list[float] = [ahead / self.count for ahead in self.lead]

    def seen(self, micro: int, stage: int) -> int:
        """Return the steps that a stage had taken at the forward pass."""
        return max(0, (micro - self.lead[stage]) // self.count)

    def forward(self, micro: int, stage: int) -> Tensor:
        return self.weights[stage][self.seen(micro, stage)]

    def backward(self, micro: int, stage: int) -> Tensor:
        return self.forward(micro, stage)

    def mean_gradients(self, step: int) -> Gradients:
        total = [torch.zeros_like(rows[0]) for rows in self.weights]
        for micro in range(step * self.count, (step + 1) * self.count):
            ways = [
                [way(micro, stage) for stage in range(self.stages)]
                for way in (self.forward, self.backward)
            ]
            for sum_, gradient in zip(total, gradients(micro, *ways), strict=True):
                sum_ += gradient / self.count
        return total

    def run(self) -> list[Tensor]:
        for step in range(self.job.steps):
            means = self.mean_gradients(step)
            for stage in range(self.stages):
                self.weights[stage].append(self.next(stage, step, means[stage]))
        return [rows[-1] for rows in self.weights]

    def next(self, stage: int, step: int, grad: Tensor) -> Tensor:
        return self.weights[stage][step] - self.rate * grad


class TwoVersions(Simulation):
    """2BW: W(t+1) = W(t) - rate * grad f(W(t-1))."""

    def forward(self, micro: int, stage: int) -> Tensor:
        return self.weights[stage][max(0, micro // self.count - 1)]


class Newest(Simulation):
    """Pipelined backpropagation without stashing: newest weights in the backward pass."""

    def backward(self, micro: int, stage: int) -> Tensor:
        return self.weights[stage][micro // self.count]


class ErrorFeedback(TwoVersions):
    """W(t+1) = W(t) - (2 U(t) - U(t-1))."""

    def __init__(self, job: AsyncJob, stages: int) -> None:
        super().__init__(job, stages)
        self.last: dict[int, Tensor] = {}

    def next(self, stage: int, step: int, grad: Tensor) -> Tensor:
        update = self.rate * grad
        last = self.last.get(stage, update)
        self.last[stage] = update
        return self.weights[stage][step] - (2 * update - last)


class Nesterov(Simulation):
    """w(t+1) = w(t) + d(t) - (1 - g) rate grad f(w + d, stale), d(t) = g (w(t) - w(t-1))."""

    gamma = 0.99

    def ahead(self, stage: int, step: int) -> Tensor:
        rows = self.weights[stage]
        return rows[step] + self.gamma * (rows[step] - rows[max(step - 1, 0)])

    def forward(self, micro: int, stage: int) -> Tensor:
        return self.ahead(stage, self.seen(micro, stage))

    def next(self, stage: int, step: int, grad: Tensor) -> Tensor:
        return self.ahead(stage, step) - (1 - self.gamma) * self.rate * grad

    def run(self) -> list[Tensor]:
        super().run()
        return [self.ahead(stage, self.job.steps) for stage in range(self.stages)]


class PipeMare(Newest):
    """T1: rate / delay ** (1 - k / K). T2: backward with w - delay * trend."""

    left, steps_annealed = 0.135, 10

    def __init__(self, job: AsyncJob, stages: int) -> None:
        super().__init__(job, stages)
        self.trend = [torch.zeros_like(rows[0]) for rows in self.weights]

    def backward(self, micro: int, stage: int) -> Tensor:
        return self.weights[stage][micro // self.count] - self.delays[stage] * self.trend[stage]

    def next(self, stage: int, step: int, grad: Tensor) -> Tensor:
        power = 1 - min(step / self.steps_annealed, 1)
        rate = self.rate / max(self.delays[stage], 1) ** power
        now = self.weights[stage][step]
        after: Tensor = now - rate * grad
        if self.delays[stage]:
            y = self.left ** (1 / self.delays[stage])
            self.trend[stage] = y * self.trend[stage] + (1 - y) * (after - now)
        return after


class Spike(Newest):
    """w - rate (a v + b g), a = m ** D, b = (1 - m ** D) / (1 - m); forward at w - rate D v."""

    def __init__(self, job: AsyncJob, stages: int) -> None:
        super().__init__(job, stages)
        self.velocity = [[torch.zeros_like(rows[0])] for rows in self.weights]

    def forward(self, micro: int, stage: int) -> Tensor:
        step = self.seen(micro, stage)
        moved: Tensor = self.rate * self.delays[stage] * self.velocity[stage][step]
        return self.weights[stage][step] - moved

    def next(self, stage: int, step: int, grad: Tensor) -> Tensor:
        m, delay = self.job.momentum, self.delays[stage]
        velocity = m * self.velocity[stage][step] + grad
        self.velocity[stage].append(velocity)
        a, b = m**delay, (1 - m**delay) / (1 - m)
        moved: Tensor = self.rate * (a * velocity + b * grad)
        return self.weights[stage][step] - moved


Maker = Callable[[AsyncJob, int], Simulation]
