"""Attached: a model under FSDP2 or DDP, its channels, its steps and its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, Literal

from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.engines import stateful
from hybridcomp.engines.session import say
from hybridcomp.session import EngineSession

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
        session: EngineSession,
        parameters: Callable[[], Iterable[Tensor]],
        divisors: Callable[[], Mapping[str, float]],
        layout: Mapping[str, Any],
        uneven: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin at step 0 with nothing left out.

        Args:
            kind: which of torch's engines it is.
            session: its channels.
            parameters: gives what an optimizer of this model holds, as it is now.
            divisors: gives by name of a residual what the sum of that message is divided by before
                it is a gradient: the unit of the residual.
            layout: how residuals are spread over the ranks; equal where they may be taken over as
                they are.
            uneven: says whether ranks may make different numbers of steps from now on, so that none
                of them is one that all ranks count.
        """
        self.kind = kind
        self.number = next(_numbers)  # in the order of attaching, which all ranks share
        self.session = session
        self.layout = dict(layout)
        self.divisors = divisors
        self._parameters, self._uneven = parameters, uneven
        self._optimizers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._is_open = self._has_reduced = False
        self.optimizer_calls = 0  # optimizer steps that were run, several in a step of training
        self.keep: list[Any] = []  # what must live as long as the model

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

    def take_events(self) -> list[tuple[str, float]]:
        """Names and figures of the last report of the ledger, once: for the logger of a trainer."""
        return self.session.take_events()

    def entered(self) -> None:
        """Note that a forward pass in training begins."""
        if self._uneven():
            say(UNEVEN)
            return
        if not self._is_open and self.channels.config.measured():
            self.session.begin_step()
        self._is_open = True

    def reduced(self) -> None:
        """Note that gradients are being reduced."""
        self._has_reduced = True

    def owns(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` holds any parameter of this model."""
        known = self._optimizers.get(optimizer)
        if known is None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            known = any(id(parameter) in held for parameter in self._parameters())
            self._optimizers[optimizer] = known
        return known

    def stepped(self) -> None:
        """Count an optimizer step, once for each forward pass whose gradients were reduced.

        Several optimizers, or one for each parameter, are one step. A collective over the job
        where something is due: a report, a measurement, the guard.
        """
        if self._is_open and self._has_reduced:
            self._is_open = self._has_reduced = False
            self.session.end_step()

    def overflowed(self) -> None:
        """Forget what was left out in a step that a loss scaler skipped: it never was."""
        self._is_open = self._has_reduced = False
        self.channels.residuals.drop()

    def rescale(self, factor: float) -> None:
        """Follow a loss scale that was multiplied by ``factor``."""
        self.channels.residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as ``torch.distributed.checkpoint`` and ``pickle`` take it."""
        return stateful.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any] | stateful.SavedState) -> None:
        """Take over what ``state_dict`` gave. Raises ConfigError on the state of another job."""
        stateful.load(self, state.state if isinstance(state, stateful.SavedState) else state)

    def __reduce__(self) -> tuple[type[stateful.SavedState], tuple[dict[str, Any]]]:
        return stateful.SavedState, (self.state_dict(),)
