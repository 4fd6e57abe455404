"""The arithmetic of meetings on plain tensors: what an island sends, and what it makes of a mean.

One ``Fragment`` is one stretch of the weights, on one rank. It knows no process group: who drives
it sends ``send``'s tensor to the peers and gives ``arrive`` the tensors of all islands.

With G the weights that all islands agreed on last, w this island's own and R islands:

1. ``send``: the message is what w has moved since this island's last message, as ``base - w``,
   plus what error feedback kept: ``m = (base - w) + decay * e``.
2. ``arrive``: ``e = m - sent``, where ``sent`` is what the others decode of m. Momentum is
   ``b = momentum * b + mean(sent)``, and ``G -= lr * (mean + momentum * b)`` with Nesterov, else
   ``G -= lr * b``.
3. w becomes ``mix * w + (1 - mix) * G``; with ``keeps_progress`` instead G plus all that this
   island has moved and not yet shared.

Local SGD is ``lr`` 1 without momentum, DiLoCo (Douillard et al. 2023, algorithm 1) Nesterov at 0.7,
Streaming DiLoCo (Douillard et al. 2025, algorithm 2) takes a mean ``delay`` steps late and mixes,
SparseLoCo (Sarfi et al. 2025, algorithm 1) decays e and has no b, and WSP of HetPipe (Park et al.
2020) keeps its progress for as many meetings as an island may be ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class OuterRule:
    """Arithmetic that a block asks for; see the module.

    Attributes:
        lr, momentum, nesterov: of the outer SGD.
        error_feedback: whether what a message left out goes into a later one.
        decay: factor on what was left out.
        mix: share of the own weights that is kept when a mean arrives.
        keeps_progress: whether an island keeps what it has moved since it sent.
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
    """A message that was sent and whose mean has not arrived.

    Attributes:
        message: what was sent, before encoding; None: nothing, the island has come since then or
            gone back to the weights of the others.
        kept: the residual that went into it; None: none.
        moved: what the island had moved since its message before; None unless progress is kept.
    """

    message: Tensor | None
    kept: Tensor | None
    moved: Tensor | None


@dataclass(eq=False)
class Fragment:
    """A stretch of the weights between meetings, on one rank; 1-D tensors of one dtype.

    Tensors are replaced, never changed, so that what a meeting has changed can be put back.

    Attributes:
        rule: the arithmetic.
        start: the weights that all islands agreed on last; equal in all islands.
        momentum: of the outer SGD, equal in all islands; None: none yet.
        residual: what messages left out; None: nothing.
        base: where this island's next message counts from; None: ``start``.
        under_way: messages that were sent, oldest first.
    """

    rule: OuterRule
    start: Tensor
    momentum: Tensor | None = None
    residual: Tensor | None = None
    base: Tensor | None = None
    under_way: deque[PendingRound] = field(default_factory=deque)

    def send(self, now: Tensor) -> Tensor:
        """Return the message of the own weights ``now``; they are not kept, nor changed."""
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
        """Take part in a meeting that has begun, and to which this island has sent nothing."""
        self.under_way.append(PendingRound(None, None, None))

    def arrive(self, sent: Sequence[Tensor], own: int, now: Tensor) -> Tensor:
        """Take what the islands sent, in their order; return this island's weights from now on.

        Args:
            sent: the decoded messages, one per island that took part; all finite.
            own: this island's place among them; -1: its message is not there.
            now: the own weights.
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
        if not self.under_way and torch.equal(self.base, now):  # nothing is left to keep
            self.base = self.start.clone()
            return self.start.clone()
        shift = -change if message.moved is None else message.moved - change
        self.base = self.base + shift
        return now + shift

    def skip(self) -> None:
        """Cancel the oldest meeting: add the weight change that it sent to the next message."""
        message = self.under_way.popleft()
        if message.kept is not None:
            self._keep(message.kept)
        if self.base is not None and message.moved is not None:
            self.base = self.base + message.moved

    def fall_back(self) -> Tensor:
        """Return the weights that all islands last agreed on, for an island that lost its copy.

        Of what it has sent nothing is made up for.
        """
        self.residual, self.base = None, None
        self.under_way = deque(PendingRound(None, None, None) for _ in self.under_way)
        if self.rule.keeps_progress:
            self.base = self.start.clone()
        return self.start.clone()

    def _keep(self, left: Tensor) -> None:
        self.residual = left if self.residual is None else self.residual + left

    def _outer(self, mean: Tensor) -> Tensor:
        """Return what outer SGD subtracts from the weights for the pseudo-gradient ``mean``."""
        rule = self.rule
        if not rule.momentum:
            return mean.mul_(rule.lr)
        kept = torch.zeros_like(mean) if self.momentum is None else self.momentum * rule.momentum
        self.momentum = kept.add_(mean)
        step = mean.add_(self.momentum, alpha=rule.momentum) if rule.nesterov else self.momentum
        return step * rule.lr


def _mean(sent: Sequence[Tensor]) -> Tensor:
    """Return the mean, summed in the order of the islands so that all have the same bits."""
    total = sent[0].clone()
    for one in sent[1:]:
        total.add_(one)
    return total.div_(len(sent))
