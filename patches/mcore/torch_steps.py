"""Count steps of torch's own optimizers in a Megatron job, which need not use Megatron's.

Steps are seen by torch's hooks, as for FSDP2 and DDP. A step counts if a backward pass has reached
a parameter of any optimizer since the last one, so several optimizers after one pass are one step.
Hooks of parameters detect the pass, not messages: in a pipeline a rank may send nothing in a
backward pass, and all ranks must count alike. ``attach`` counts the steps of Megatron's optimizers,
each of which wraps one of torch's.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from hybridcomp.channels import NAME
from hybridcomp.channels.engine_state import UNCOUNTED
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown, idle
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common import optimizer_steps
from hybridcomp.patches.common.optimizer_steps import NO_PASS, backward_pass
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.session.followers import FollowerBase

#: attributes that Megatron's layers, or hybridcomp, set on parameters
MARKS = (NAME, "tensor_model_parallel", "allreduce")
#: backward passes without a step before the message, if an optimizer exists: it may accumulate
PATIENT = 1024
NOT_COUNTED = (
    "no optimizer step was seen in {} backward passes, so none is counted, and start_step, ramps, "
    "reports and publish stand still; counted are the steps of Megatron's optimizers and of every "
    "torch.optim.Optimizer"
)
ISLANDS = "islands meet after the steps of Megatron's optimizer; make it by get_megatron_optimizer"
UNWRAPPED = "Megatron's DistributedDataParallel says which weights there are; wrap the model in it"


def follow(session: EngineSession) -> None:
    """Count the steps of torch's optimizers until ``session``, of a Megatron job, closes."""
    if _of(session) is None:
        session.follow(TorchSteps(session))


def leave(session: EngineSession) -> None:
    """Record that one of Megatron's optimizers steps: from now on only its steps count."""
    found = _of(session)
    if found is not None:
        found.is_left = True


def _of(session: EngineSession) -> TorchSteps | None:
    return next(
        (follower for follower in session.followers if isinstance(follower, TorchSteps)), None
    )


class TorchSteps(FollowerBase):
    """Follower of a session that calls ``end_step`` after the steps of torch's optimizers.

    Attributes:
        is_left: whether the job has an optimizer of Megatron's; then only that one's steps count.
    """

    name = "torch steps"

    def __init__(self, session: EngineSession) -> None:
        self.is_left = False
        self._session = weakref.ref(session)
        self._hooks = optimizer_steps.register(self._before, self._after)
        #: by optimizer, the hooks of its parameters
        self._watched: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._has_looked = self._is_marked = self._has_gradients = self._is_due = False
        self._counted_behind = NO_PASS
        session.channels.on_pass = self._heard

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for handles in self._watched.values():
            for hook in handles:
                hook.remove()

    # steps

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Call the followers before the weights change; the first call looks for optimizers."""
        session = self._session()
        if session is None or self.is_left:
            return
        if not self._has_looked:
            self._has_looked = True
            self._look()
        if self._counts(optimizer):
            self._check(session, optimizer)
            session.before_step()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._session() is None or self.is_left:
            return
        if self._counts(optimizer):
            self._is_due |= self._has_gradients or optimizer not in self._watched
            self._watch(optimizer)
        if not self._is_due or optimizer_steps.is_inside_another():
            return
        if (running := backward_pass()) == NO_PASS:
            self._count()
        elif running != self._counted_behind:
            self._counted_behind = running
            optimizer_steps.at_the_end_of_the_pass(self._count)

    def _count(self) -> None:
        self._has_gradients = self._is_due = False
        session = self._session()
        if session is not None:
            session.end_step()

    def _look(self) -> None:
        """Watch the existing optimizers; stop if one is Megatron's, which counts the steps itself.

        If two optimizers step after one pass, watching both before makes this one step, not two.
        """
        for optimizer in _living():
            if not isinstance(optimizer, Optimizer):
                self.is_left = True
                return
            self._watch(optimizer)
        self._has_gradients = True  # the pass before this step left gradients

    def _counts(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` has Megatron's parameters; True until one of them has."""
        marked = any(hasattr(p, mark) for p in _parameters(optimizer) for mark in MARKS)
        self._is_marked |= marked
        return marked or not self._is_marked

    def _watch(self, optimizer: Optimizer) -> None:
        """Watch for gradients of the parameters of ``optimizer``."""
        hooks = self._watched.get(optimizer)
        trained: list[Any] = [p for p in _parameters(optimizer) if p.requires_grad]
        if hooks is not None and len(hooks) == len(trained):
            return
        for hook in hooks or ():
            hook.remove()
        self._watched[optimizer] = [
            parameter.register_post_accumulate_grad_hook(self._note) for parameter in trained
        ]

    def _note(self, parameter: Tensor) -> None:
        self._has_gradients = True

    def _check(self, session: EngineSession, optimizer: Optimizer) -> None:
        """Raise ConfigError on keys of the block that need Megatron's optimizer or wrapper."""
        block = session.channels.config
        if block.sync.acts:
            raise ConfigError(
                f"{BLOCK}.sync", Shown(f"steps of {type(optimizer).__name__}"), ISLANDS
            )
        if block.publish is not None and all(
            follower.name != "publish" for follower in session.followers
        ):
            shown = Shown("a model outside of DistributedDataParallel")
            session.say(idle(f"{BLOCK}.publish", shown, UNWRAPPED, block.on_unsupported))

    def _heard(self, passes: int) -> None:
        """Print once that no step came within ``passes`` backward passes."""
        session = self._session()
        if session is None or passes not in (UNCOUNTED, PATIENT):
            return
        if passes == PATIENT or next(_living(), None) is None:
            session.say(NOT_COUNTED.format(passes))


def _living() -> Iterator[Any]:
    """Yield the optimizers of this process, Megatron's first, that may step."""
    gc.collect()  # a deleted one may remain in a reference cycle
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    megatrons = () if module is None else (module.MegatronOptimizer,)
    every = gc.get_objects()
    for kind in (*megatrons, Optimizer):
        yield from [one for one in every if issubclass(type(one), kind)]


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
