"""Call functions around the steps of torch's optimizers, by public hooks; number backward passes.

The hooks act on all optimizers of the process, also on those built earlier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

#: number that means that no backward pass is running
NO_PASS: Final = -1
#: the code around the step of every optimizer of torch, which calls the hooks
_STEP: Final = Optimizer.profile_hook_step(lambda: None).__code__

Hook = Callable[[Optimizer, Any, Any], None]


def register(before: Hook | None, after: Hook) -> list[Any]:
    """Call ``before`` and ``after`` around the steps of all optimizers, compiled steps too.

    Returns handles; their ``remove`` ends the calls.
    """
    disable: Any = torch.compiler.disable  # the hooks are no part of a compiled step
    hooks = [register_optimizer_step_post_hook(disable(after))]
    if before is not None:
        hooks.append(register_optimizer_step_pre_hook(disable(before)))
    return hooks


def is_inside_another() -> bool:
    """Return whether the running step was called by the step of another optimizer.

    ``ZeroRedundancyOptimizer`` does so, and sends the new weights afterwards. This looks at the
    stack, because a step that raises an error calls no hook at its end.
    """
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP
        frame = frame.f_back
    return steps == 2


def backward_pass() -> int:
    """Return the number of the backward pass that this thread runs, or ``NO_PASS``."""
    return int(torch._C._current_graph_task_id())


def at_the_end_of_the_pass(call: Callable[[], None]) -> None:
    """Call ``call`` once, at the end of the backward pass that this thread runs.

    It runs after existing callbacks, such as FSDP2's, which may reduce the last gradients.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
