"""Skip backward passes of wholly frozen stages at the front of a pipeline.

DeepSpeed's ``_exec_backward_pass`` raises an error if no output requires a gradient. The schedule
is filtered, because ``_INSTRUCTION_MAP`` captured the methods when the class was created. Norms of
gradients are summed over the stages. A stage without gradients takes part with a stand-in, because
``clip_grad_norm_`` fails without gradients, and under FP16_UnfusedOptimizer with zeros, because it
would skip the sum that the other stages wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

#: attribute of an engine: how many stages at its front are frozen
FRONT = "_hybridcomp_frozen_stages"
#: method of BF16_Optimizer that returns the gradients for the norm
NORMS = "get_grads_for_norm"


def set_front(engine: Any, wholly: Sequence[bool]) -> None:
    """Skip backward passes of the first stages; ``wholly``: per stage, whether it is frozen."""
    if not hasattr(engine, "num_stages"):
        return
    front = next((n for n, whole in enumerate(wholly) if not whole), 0)
    for name in (FRONT, "_exec_schedule", "clip_fp32_gradients", "_take_model_step"):
        vars(engine).pop(name, None)
    vars(engine.optimizer).pop(NORMS, None)
    if front:
        setattr(engine, FRONT, front)
        engine._exec_schedule = functools.partial(_exec_schedule, engine)
    if wholly and wholly[engine.stage_id]:
        engine.clip_fp32_gradients = functools.partial(_clip, engine)
        if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer":
            engine._take_model_step = functools.partial(_take_model_step, engine)
        if hasattr(engine.optimizer, NORMS):
            setattr(engine.optimizer, NORMS, functools.partial(_norms, engine))


def _exec_schedule(engine: Any, pipe_schedule: Any) -> Any:
    from deepspeed.runtime.pipe import schedule

    front, stage = getattr(engine, FRONT), engine.stage_id
    out: tuple[type, ...] = ()
    if isinstance(pipe_schedule, schedule.TrainSchedule) and stage <= front:
        out = (schedule.SendGrad,)
        if stage < front:
            out += (schedule.BackwardPass, schedule.RecvGrad)
    steps = pipe_schedule.steps

    def left() -> Iterator[list[Any]]:
        for commands in steps():
            yield [command for command in commands if not isinstance(command, out)]

    pipe_schedule.steps = left
    return type(engine)._exec_schedule(engine, pipe_schedule)


def _clip(engine: Any) -> None:
    from deepspeed.runtime.utils import clip_grad_norm_

    stand_in = nn.Parameter(torch.zeros(1, device=engine.device, dtype=torch.float32))
    stand_in.grad = torch.zeros_like(stand_in)
    clip_grad_norm_(parameters=[stand_in], max_norm=engine.gradient_clipping(), mpu=engine.mpu)


def _take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
    firsts = [group[0] for group in engine.optimizer.fp16_groups]
    for parameter in firsts:
        parameter.grad = torch.zeros_like(parameter)
    try:
        return type(engine)._take_model_step(engine, *args, **kwargs)
    finally:
        for parameter in firsts:
            parameter.grad = None


def _norms(engine: Any, for_clipping: bool = False) -> Any:
    found = getattr(type(engine.optimizer), NORMS)(engine.optimizer, for_clipping)
    if for_clipping or found[0]:
        return found
    return [torch.zeros(1, device=engine.device, dtype=torch.float32)], found[1]
