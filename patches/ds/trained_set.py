"""Detect parameters of a DeepSpeed engine that are frozen or unfrozen during training.

DeepSpeed's optimizers of ZeRO 1 to 3, and those of stage 0 with 16 bits, hold one flat copy of the
parameters that required gradients when the engine was built. They step the whole copy, with zero
gradients for parameters frozen since, which Adam's momentum and weight decay keep changing.
Parameters unfrozen later are in no copy: their gradients are neither reduced nor used. This is so
with and without hybridcomp, and nothing else reports it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from hybridcomp.channels import NAME
from hybridcomp.patches.common.trained_set import TrainedFollower, TrainedSet
from hybridcomp.patches.ds.job_facts import tensor_rank
from hybridcomp.session.engine_session import EngineSession

#: attribute of an engine: its ``TrainedSet``
TRAINED = "_hybridcomp_trained_set"
MOVES = (
    ", and DeepSpeed goes on changing them: its optimizer steps with gradients of zero, and "
    "momentum and weight decay move them. To keep them as they are, call hybridcomp.freeze(engine, "
    "names) in place of requires_grad_(False)"
)
IGNORED = (
    " that did not when the engine was built: DeepSpeed neither reduces nor uses their gradients, "
    "and they stay as they are. To train them, build the engine anew, or build it with them and "
    "set the lr of their parameter group to 0 until then"
)


def watch(engine: Any, session: EngineSession) -> None:
    """Check before every step of ``engine``, on the first rank of each pipeline stage."""
    if dist.get_rank(engine.seq_data_parallel_group) or tensor_rank(engine.mpu):
        return
    named = [(getattr(p, NAME), p) for p in engine.module.parameters()]
    setattr(engine, TRAINED, TrainedSet(named))
    session.follow(_Engine(engine))


class _Engine(TrainedFollower):
    """A follower that holds its engine weakly, since the process keeps sessions alive."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def before_step(self) -> None:
        """Check, and print what has changed."""
        engine = self._engine()
        if engine is None:
            return
        trained: TrainedSet = getattr(engine, TRAINED)
        changed = trained.look()
        if changed is None:
            return
        stopped, begun = changed
        # torch's own optimizer skips parameters without a gradient
        plain = isinstance(engine.optimizer, Optimizer)
        if not plain:
            trained.tell([n for n in stopped if n in trained.first], "stopped", MOVES)
        held = _held(engine.optimizer) if plain else set()
        later = [n for n, p in begun.items() if n not in trained.first and id(p) not in held]
        trained.tell(later, "began", IGNORED)

    def accept(self) -> None:
        """Accept the present state of all parameters."""
        engine = self._engine()
        if engine is not None:
            getattr(engine, TRAINED).accept()


def _held(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
