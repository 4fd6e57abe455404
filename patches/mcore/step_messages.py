"""Predict the gradient and parameter messages of Megatron's steps, and the memory they take."""

from __future__ import annotations

from typing import Any

from hybridcomp.channels import StepTraffic
from hybridcomp.channels.accounting.memory import memory_lines
from hybridcomp.channels.memory_use import note
from hybridcomp.dimensions import Dimension
from hybridcomp.session.engine_session import EngineSession


def tell(session: EngineSession, wrapped: Any) -> None:
    """Record the messages of one model chunk ``wrapped`` in DDP, and log the memory they take.

    Messages are the buckets of upstream's buffers. The memory of a rank's chunks adds up, so the
    line logged for the last chunk covers all of them.
    """
    sharded = bool(wrapped.ddp_config.use_distributed_optimizer)
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        numels = tuple(int(bucket.grad_data.numel()) for bucket in buffer.buckets)
        _add(session, "dp", StepTraffic(numels, "scatter" if sharded else "sum"), buffer)
        if sharded:
            _add(session, "zero", StepTraffic(numels, "gather"), buffer)
    session.say(*memory_lines(session.memory))


def _add(session: EngineSession, name: Dimension, sent: StepTraffic, buffer: Any) -> None:
    """Add the messages ``sent`` of a buffer to those of other buffers."""
    channels, device = session.channels, buffer.buckets[0].grad_data.device
    group = channels[name].group(buffer.data_parallel_group)
    dtype = buffer.grad_dtype if name == "dp" else buffer.param_dtype
    note(channels, {name: sent}, {name: group}, dtype, device, beside=True)
