"""Attached: a model under FSDP2 or DDP, its channels, its steps and its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.resharing import Sends
from hybridcomp.patches.torch import stateful
from hybridcomp.patches.torch.session import say
from hybridcomp.patches.torch.unseen_steps import UnseenSteps
from hybridcomp.session.engine_session import EngineSession

Kind = Literal["ddp", "fsdp2"]
UNEVEN = (
    "join(): from here on steps are not counted, as ranks make different numbers of them; reports, "
    "samples, the guard, ramps and start_step stand still"
)
_numbers = count()


class Attached:
    """What ``hybridcomp.attach`` hands back.

    A ``Stateful``: put it into what ``torch.distributed.checkpoint`` saves and loads. Pickled it is
    a ``stateful.SavedState``, which ``load_state_dict`` takes, too.
    """

    def __init__(
        self,
        kind: Kind,
        identity: str,
        session: EngineSession,
        parameters: Callable[[], Iterable[Tensor]],
        divisors: Callable[[], Mapping[str, float]],
        layout: Mapping[str, Any],
        sends: Callable[[], Mapping[str, Sends]],
        uneven: Callable[[], bool] = lambda: False,
        reduces: bool = True,
    ) -> None:
        """Begin at step 0 with nothing left out.

        Args:
            kind: which of torch's engines it is.
            identity: which model it is (``identity``).
            session: its channels.
            parameters: gives what an optimizer of this model holds, as it is now.
            divisors: gives by name of a residual what the sum of that message is divided by before
                it is a gradient: the unit of the residual.
            layout: how residuals are spread over the ranks; equal where they may be taken over as
                they are.
            sends: gives by name of a residual what of it this rank encodes.
            uneven: says whether ranks may make different numbers of steps from now on, so that none
                of them is one that all ranks count.
            reduces: whether torch hands over gradients to be reduced: on one rank FSDP2 does not.
        """
        self.kind, self.identity = kind, identity
        self.number = next(_numbers)  # in the order of attaching, which all ranks share
        self.session = session
        self.layout = dict(layout)
        self.divisors, self.sends = divisors, sends
        self._parameters, self._uneven, self._reduces = parameters, uneven, reduces
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unseen = UnseenSteps(parameters, self.owns)
        self._is_open = self._has_reduced = False
        self._has_news = False  # whether gradients were reduced since somebody looked for a step
        self.optimizer_calls = 0  # optimizer steps that were run, several in a step of training
        self.is_detached = False
        self._undo: list[Callable[[], object]] = []

    @property
    def channels(self) -> Channels:
        """The channels of the model."""
        return self.session.channels

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.channels.step

    @property
    def is_open(self) -> bool:
        """Whether a forward pass in training has begun whose optimizer step is still to come."""
        return self._is_open

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Have ``undo`` called when the model is detached; it lives as long as this object."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Give the model its native communication back; nothing of it is kept. No collective.

        Every rank calls it between two steps. Gradients that error feedback held back are dropped,
        which is said: ``hybridcomp.save_state`` before keeps them. Harmless when called twice.
        """
        if self.is_detached:
            return
        self.is_detached = True
        while self._undo:
            self._undo.pop()()
        residuals = self.channels.residuals
        if norm := residuals.norm():
            say(
                f"detach: what error feedback held back, of norm {norm:.3g} on rank 0 after step "
                f"{self.step}, goes into no step any more; hybridcomp.save_state before detaching "
                "keeps it"
            )
        residuals.clear()
        self.session.close()

    def take_events(self) -> list[tuple[str, float]]:
        """Names and figures of the last report of the ledger, once: for the logger of a trainer."""
        return self.session.take_events()

    def entered(self) -> None:
        """Note that a forward pass in training begins."""
        if self._uneven():
            say(UNEVEN)
            return
        looks = self._has_news and not self.optimizer_calls
        if looks and not torch.compiler.is_compiling():
            self._has_news = False
            if self._unseen.have_come():
                self.stepped()
        if not self._is_open and self.channels.config.measured():
            self.session.begin_step()
        self._is_open = True

    def reduced(self) -> None:
        """Note that gradients are being reduced."""
        if not self._has_reduced and not self.optimizer_calls:
            self._unseen.begin()
        self._has_reduced = self._has_news = True

    def owns(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` holds any parameter of this model."""
        if optimizer in self._optimizers:
            return True
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in self._parameters()):
            self._optimizers.add(optimizer)  # one that holds none yet may be given some later
            return True
        return False

    def count_step(self) -> None:
        """Count a step of an optimizer that is no ``torch.optim.Optimizer``; every rank calls it.

        Those of torch are counted by themselves. Harmless where no gradients were reduced since the
        step before.
        """
        self.optimizer_calls += 1
        self.stepped()

    def stepped(self) -> None:
        """Count an optimizer step, once for each forward pass whose gradients were reduced.

        Several optimizers, or one for each parameter, are one step. A collective over the job
        where something is due: a report, a measurement, the guard.
        """
        if self._is_open and (self._has_reduced or not self._reduces):
            self._is_open = self._has_reduced = False
            self.session.end_step()

    def overflowed(self) -> None:
        """Forget what was left out in a step that a loss scaler skipped: it never was."""
        self._is_open = self._has_reduced = False
        self.channels.residuals.drop()
        self.channels.reopen_step()

    def rescale(self, factor: float) -> None:
        """Follow a loss scale that was multiplied by ``factor``."""
        self.channels.residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as ``torch.distributed.checkpoint`` and ``pickle`` take it."""
        return stateful.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any] | stateful.SavedState) -> None:
        """Take over what ``state_dict`` gave; every rank calls it.

        Raises on every rank, with nothing changed: ConfigError on the state of another job,
        CheckpointError where the entry of a rank is damaged.
        """
        stateful.load(self, state.state if isinstance(state, stateful.SavedState) else state)

    def __reduce__(self) -> tuple[type[stateful.SavedState], tuple[dict[str, Any]]]:
        return stateful.SavedState, (self.state_dict(),)
