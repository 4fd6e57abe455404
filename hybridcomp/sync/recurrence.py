"""Compute on plain tensors what an island sends to a meeting, and how it applies the mean.

A ``Fragment`` is one slice of the weights, on one rank. It knows no process group: its caller sends
the tensor of ``send`` to the peers and passes all islands' tensors to ``arrive``.

With G the weights on which all islands last agreed, and w this island's own weights:

1. ``send``: the message is the change of w since this island's last message, ``base - w``, plus the
   residual of error feedback: ``m = (base - w) + decay * e``.
2. ``arrive``: ``e = m - sent``, where ``sent`` is m as the others decode it. Momentum is ``b =
   momentum * b + mean(sent)``, and ``G -= lr * (mean + momentum * b)`` with Nesterov, else ``G -=
   lr * b``.
3. w becomes ``mix * w + (1 - mix) * G``; with ``keeps_progress`` instead G plus this island's
   changes that are not shared yet.

Local SGD is ``lr`` 1 without momentum, DiLoCo (Douillard et al. 2023, algorithm 1) Nesterov at 0.7,
Streaming DiLoCo (Douillard et al. 2025, algorithm 2) takes a mean ``delay`` steps late and mixes,
SparseLoCo (Sarfi et al. 2025, algorithm 1) decays e and has no b, and HetPipe's WSP (Park et al.
2020) keeps progress for as many meetings as an island may be ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class OuterRule:
    """The arithmetic that a block selects; see the module.

    Attributes:
        lr, momentum, nesterov: settings of the outer SGD.
        error_feedback: whether the encoding error of a message is added to a later message.
        decay: factor on that error.
        mix: weight of an island's own weights when a mean arrives; agreed weights get 1 - ``mix``.
        keeps_progress: whether an island keeps the changes that it made since it sent the message.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    error_feedback: bool = False
    decay: float = 1.0
    mix: float = 0.0
    keeps_progress: bool = False


@dataclass
class PendingRound:
    """A message that was sent and whose mean has not arrived yet.

    Attributes:
        message: the message before encoding; None: there is none, since the island joined later or
            returned to the weights of the other islands.
        kept: the residual that the message includes; None: there is none.
        moved: the weight change since the island's previous message; None unless progress is kept.
    """

    message: Tensor | None
    kept: Tensor | None
    moved: Tensor | None


@dataclass(eq=False)
class Fragment:
    """A slice of the weights between meetings, on one rank; 1-D tensors of one dtype.

    Tensors are replaced, never modified, so that a meeting can be undone.

    Attributes:
        rule: the arithmetic.
        start: the weights on which all islands last agreed; equal in all islands.
        momentum: momentum of the outer SGD, equal in all islands; None: none yet.
        residual: accumulated error of messages; None: zero.
        base: weights from which this island's next message is computed; None: ``start``.
        under_way: messages that were sent, oldest first.
    """

    rule: OuterRule
    start: Tensor
    momentum: Tensor | None = None
    residual: Tensor | None = None
    base: Tensor | None = None
    under_way: deque[PendingRound] = field(default_factory=deque)

    def send(self, now: Tensor) -> Tensor:
        """Return the message for this island's weights ``now``, which stay unchanged."""
        rule, kept = self.rule, self.residual
        moved = (self.start if self.base is None else self.base) - now
        message = moved
        if kept is not None:
            message = torch.add(moved, kept, alpha=rule.decay)
        self.residual = None
        if rule.keeps_progress:
            self.base = now.clone()
        self.under_way.append(PendingRound(message, kept, moved if rule.keeps_progress else None))
        return message

    def listen(self) -> None:
        """Take part in a meeting that has begun, without having sent a message."""
        self.under_way.append(PendingRound(None, None, None))

    def arrive(self, sent: Sequence[Tensor], own: int, now: Tensor) -> Tensor:
        """Apply the islands' messages, in their order; return this island's new weights.

        Args:
            sent: the decoded messages, one per island that took part; all finite.
            own: index of this island's message; -1: it has none.
            now: this island's own weights.
        """
        rule, message = self.rule, self.under_way.popleft()
        if rule.error_feedback and message.message is not None:
            left = message.message if own < 0 else message.message - sent[own]
            self._keep(left)
        change = self._outer(_mean(sent))
        self.start = self.start - change
        if not rule.keeps_progress:
            return torch.lerp(self.start, now, rule.mix) if rule.mix else self.start.clone()
        assert self.base is not None, "sent"
        if not self.under_way and torch.equal(self.base, now):  # no unshared change is left
            self.base = self.start.clone()
            return self.start.clone()
        shift = -change if message.moved is None else message.moved - change
        self.base = self.base + shift
        return now + shift

    def skip(self) -> None:
        """Cancel the oldest pending meeting; its weight change is added to the next message."""
        message = self.under_way.popleft()
        if message.kept is not None:
            self._keep(message.kept)
        if self.base is not None and message.moved is not None:
            self.base = self.base + message.moved

    def fall_back(self) -> Tensor:
        """Return the weights that all islands last agreed on, for an island that lost its weights.

        Changes that this island has already sent are lost to it.
        """
        self.residual, self.base = None, None
        self.under_way = deque(PendingRound(None, None, None) for _ in self.under_way)
        if self.rule.keeps_progress:
            self.base = self.start.clone()
        return self.start.clone()

    def _keep(self, left: Tensor) -> None:
        self.residual = left if self.residual is None else self.residual + left

    def _outer(self, mean: Tensor) -> Tensor:
        """Return the update that outer SGD subtracts for the pseudo-gradient ``mean``."""
        rule = self.rule
        if not rule.momentum:
            return mean.mul_(rule.lr)
        kept = torch.zeros_like(mean) if self.momentum is None else self.momentum * rule.momentum
        self.momentum = kept.add_(mean)
        step = mean.add_(self.momentum, alpha=rule.momentum) if rule.nesterov else self.momentum
        return step * rule.lr


def _mean(sent: Sequence[Tensor]) -> Tensor:
    """Return the mean, summed in island order so that all have the same bits."""
    total = sent[0].clone()
    for one in sent[1:]:
        total.add_(one)
    return total.div_(len(sent))
