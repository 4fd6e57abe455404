"""Attached: a model under FSDP2 or DDP, its channels, its steps and its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint import saved_state
from hybridcomp.channels.checkpoint.resharing import Sends
from hybridcomp.job import agreement
from hybridcomp.log import say_once as say
from hybridcomp.patches.common.optimizer_steps import (
    NO_PASS,
    at_the_end_of_the_pass,
    backward_pass,
)
from hybridcomp.patches.torch.loss_scale import LossScale
from hybridcomp.patches.torch.state import stateful
from hybridcomp.patches.torch.step_detection import LOCAL, PATIENCE, UnseenSteps
from hybridcomp.session.engine_session import EngineSession

Kind = Literal["ddp", "fsdp2"]
UNEVEN = (
    "join(): from here on steps are not counted, as ranks make different numbers of them; reports, "
    "samples, the guard, ramps and start_step stand still"
)
LOADED = (
    "weights were loaded into an attached model, and no state of hybridcomp. If they are of a "
    "compressed run"
)
#: what ranks state at the first step of a model on part of the job
FIRST_STEP = (
    "first step (guard and ledger sum over the whole job: if a model is on part of the ranks, "
    "attach one on the others, too)"
)
_numbers = count()


class Attached:
    """Result of ``hybridcomp.attach``: the channels, steps and state of one model.

    A ``Stateful``: put it into the state that ``torch.distributed.checkpoint`` saves and loads.
    Pickled it becomes a ``stateful.SavedState``, which ``load_state_dict`` takes, too.
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
        """Begin at step 0 without residuals.

        Args:
            kind: the engine of torch.
            identity: digest of the model's parameters (module ``identity``).
            session: session with the model's channels.
            parameters: returns the parameters that an optimizer holds, as they are now.
            divisors: returns, by name of a residual, its unit: the ratio of its message's sum to
                the gradient.
            layout: the split of residuals over the ranks; where it is equal to a checkpoint's,
                each rank loads the residuals that it saved.
            sends: returns, by name of a residual, the ranges of it that this rank encodes.
            uneven: returns whether ranks may make different numbers of steps from now on, so that
                steps can no longer be counted alike on all ranks.
            reduces: whether torch reduces gradients; on one rank FSDP2 does not.
        """
        self.kind, self.identity = kind, identity
        self.ranks: tuple[int, ...] | None = None  # ranks that attach this model; None: all
        self.number = next(_numbers)  # in the order of attaching, equal on all ranks
        self.session = session
        self.channels: Channels = session.channels
        self.layout = dict(layout)
        self.divisors, self.sends = divisors, sends
        self._parameters, self._uneven, self._reduces = parameters, uneven, reduces
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unseen = UnseenSteps(parameters, self.owns)
        #: whether a pass with gradients has begun whose optimizer step has not run yet
        self.is_open = False
        self._has_reduced = False
        self._may_validate = False  # whether the step has begun with a module in eval mode
        self._has_news = False  # whether gradients were reduced since the last forward pass
        self._counted_behind = NO_PASS  # the backward pass at whose end a step is counted
        #: optimizers that have stepped since gradients were reduced last
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_due = False  # whether an optimizer has stepped inside of another one
        self.loss_scale = LossScale(self.rescale)
        self.optimizer_calls = 0  # calls of optimizers' step, maybe several per training step
        self.is_detached = False
        self._has_stepped = False
        #: averages, before an optimizer's step, tables whose gradients no rank reduces
        self.average_ignored: Callable[[Any], object] | None = None
        self._undo: list[Callable[[], object]] = []

    @property
    def step(self) -> int:
        """Return the number of optimizer steps taken."""
        return self.channels.step

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the model is detached; this object keeps a reference to it."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Restore the model's native communication and drop its state. No collective.

        Every rank calls it between two steps. Residuals are dropped, with a message;
        ``hybridcomp.save_state`` before keeps them. Harmless when called twice.
        """
        if self.is_detached:
            return
        self.is_detached = True
        with ExitStack() as ends:  # run all callbacks even if one fails
            ends.callback(self.session.close)
            ends.callback(self.channels.residuals.clear)
            ends.callback(self.channels.node_sums.drop)
            ends.callback(self._say_lost)
            for undo in self._undo:
                ends.callback(undo)
            self._undo.clear()

    def _say_lost(self) -> None:
        if norm := self.channels.residuals.norm():
            say(
                f"detach: what error feedback held back, of norm {norm:.3g} on rank 0 after step "
                f"{self.step}, goes into no step any more; hybridcomp.save_state before detaching "
                "keeps it"
            )

    def take_events(self) -> list[tuple[str, float]]:
        """Return names and figures of the ledger's last report, once, for a trainer's logger."""
        return self.session.take_events()

    def entered(self, trains: bool = True) -> None:
        """Record that a forward pass with gradients begins, for training or for validation.

        ``trains``: whether the module is in training mode. Steps are counted in both modes; only
        the clock of a step restarts when training follows a validation.
        """
        compiles = torch.compiler.is_compiling()
        if not compiles and backward_pass() != NO_PASS:
            return  # activation checkpointing repeats a forward pass
        if self._uneven():
            say(UNEVEN)
            return
        if self._has_news and not compiles:
            self._has_news = False
            if self._unseen.stepped_since_begin(self.channels.passes, self.optimizer_calls > 0):
                self.stepped()
        if not self.is_open:
            self._begin()
        restarts = self._may_validate and trains and not self._has_reduced
        if restarts:
            self.channels.tuner.reopen_step()
        if (restarts or not self.is_open) and self.channels.config.measured():
            self.session.begin_step()
        self._may_validate = not trains and (self._may_validate or not self.is_open)
        self.is_open = True

    def _begin(self) -> None:
        self._say_if_forgetful()
        self.session.before_step()

    def _say_if_forgetful(self) -> None:
        """Print which state restarts because weights were loaded without it."""
        kept = saved_state.has_feedback(self.channels) or self.channels.config.measured()
        if self.session.forgetful and kept:
            lost = saved_state.anew(self.channels)
            say(f"{LOADED}: steps count on from {self.step}, {', '.join(lost)}. {stateful.BRING}")
        self.session.restored = self.session.loaded = False

    def reduced(self) -> None:
        """Record that gradients are being reduced, before a message takes their residuals."""
        if not self.is_open and not self._uneven():
            self._begin()  # no hook has seen the pass (``register_fsdp_forward_method``)
            self.is_open = True
        if not self._has_reduced:
            self.loss_scale.before_messages()
            self._alone.clear()
            if not self.optimizer_calls:
                self._unseen.begin()
        self._has_reduced = self._has_news = True

    def owns(self, optimizer: Any) -> bool:
        """Return whether ``optimizer`` holds any parameter of this model."""
        if optimizer in self._optimizers:
            return True
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in self._parameters()):
            self._optimizers.add(optimizer)  # "no" is not kept: it may get parameters later
            return True
        return False

    def held(self) -> set[int]:
        """Return the ids of the parameters in optimizers of torch that have stepped."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def count_step(self) -> None:
        """Count a step of an optimizer that is no ``torch.optim.Optimizer``; every rank calls it.

        Steps of torch's optimizers are counted automatically. Harmless where no gradients were
        reduced since the step before.
        """
        self.optimizer_calls += 1
        self.stepped()

    def called(self, optimizer: Any) -> None:
        """Record that ``step`` of an optimizer with parameters of the model ends.

        If optimizers call each other, ``stepped`` counts one step when the outermost one ends.
        """
        self.optimizer_calls += 1
        self.is_due = True
        if self._has_reduced or not self._reduces or self._uneven():
            return
        if optimizer in self._alone:  # a second step without reduced gradients
            self.channels.passes += 1
            if self.channels.passes == PATIENCE:
                say(LOCAL)
        self._alone.add(optimizer)

    def stepped(self) -> None:
        """Count an optimizer step whose gradients were reduced since the last counted one.

        So the steps of several optimizers, or of one per parameter, count as one. Steps inside a
        backward pass count once, at its end. It is a collective over the job if a report, a
        measurement or the guard is due.
        """
        self.is_due = False
        if self._uneven() or not self._is_uncounted:
            return
        if (running := backward_pass()) == NO_PASS:
            self._count()
        elif running != self._counted_behind:
            self._counted_behind = running
            at_the_end_of_the_pass(self._count)

    @property
    def _is_uncounted(self) -> bool:
        """Return whether gradients were reduced since the last counted step."""
        return self._has_reduced or (self.is_open and not self._reduces)

    def _count(self) -> None:
        self.is_open = self._has_reduced = self._has_news = False
        if self.ranks is not None and not self._has_stepped:
            # or this rank would wait in a sum, without a word, for ranks that attach no model
            agreement.tell({}, what=FIRST_STEP, seconds=agreement.patience_s())
        self._has_stepped = True
        self.session.end_step()

    def overflowed(self) -> None:
        """Drop the residuals of a step that a loss scaler skipped, and begin the step again."""
        is_first = self._is_uncounted  # not of several optimizers' calls in one step
        self.is_open = self._has_reduced = False
        self.channels.passes = 0
        self.channels.residuals.drop()
        self.channels.tuner.reopen_step()
        if is_first:
            self.session.skip_step()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``, by which the loss scale has changed."""
        self.channels.residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for ``torch.distributed.checkpoint`` and ``pickle``."""
        return stateful.state_of(self)

    def load_state_dict(
        self, state: Mapping[str, Any] | stateful.SavedState, loss_scale: float | None = None
    ) -> None:
        """Load what ``state_dict`` returned; every rank calls it.

        ``loss_scale``: the factor on the gradients from now on; None: the scale of this process's
        GradScaler, or without a GradScaler the saved scale.

        Raises on every rank, with nothing changed: ConfigError on the state of another job,
        CheckpointError where the entry of a rank is damaged.
        """
        entries = state.state if isinstance(state, stateful.SavedState) else state
        stateful.load(self, entries, loss_scale)

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copied model does not get the channels, hooks and optimizers."""
        if not self.is_detached:
            say(
                "copy.deepcopy of an attached model: the copy sends natively; if it is trained, "
                "too, call hybridcomp.attach on it"
            )

    def __reduce__(self) -> tuple[type[stateful.SavedState], tuple[dict[str, Any]]]:
        return stateful.SavedState, (self.state_dict(),)
