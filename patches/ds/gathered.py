"""Provide a DeepSpeed engine's whole weights for a roll-out (``hybridcomp.gathered``).

Under ZeRO 3 each parameter gets the whole weight as its data and is marked as available. The hooks
that fetch and release parameters are removed meanwhile, since each module's hook would release its
weights. Values come from the shares (``ds_tensor``), also for persistent parameters. Below stage 3
every rank has all weights, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.channels import channels_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation.gathered import CutWeight, WeightGather
from hybridcomp.generation.rolling_out import WHAT, rolling_out, without_hooks
from hybridcomp.job.parameter_names import named_once
from hybridcomp.patches.ds import island_unit
from hybridcomp.patches.ds.job_facts import GATHERED
from hybridcomp.patches.ds.zero.partitions import filled

PIPELINE = (
    "its ranks hold stages, so that no rank computes with all weights; sample with "
    "hybridcomp.generate"
)


def gathered(engine: Any) -> AbstractContextManager[nn.Module]:
    """Return the context of ``hybridcomp.gathered`` for an engine."""
    islands = island_unit.islands_of_engine(engine)
    whole = islands is None or len(islands.ranks) == dist.get_world_size()
    return rolling_out(
        engine.module,
        lambda: _gather_of(engine, whole),
        lambda found, undo: _put(engine, found, undo),
        None if islands is None or whole else islands.ranks,
        None if whole else engine.data_parallel_group,
        torch.device(engine.device),
    )


def _gather_of(engine: Any, whole_job: bool) -> WeightGather | None:
    """Return the engine's ``WeightGather``; None below stage 3. Raises ConfigError."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if isinstance(engine, PipelineEngine):
        raise ConfigError(WHAT, Shown("a PipelineEngine"), PIPELINE)
    if engine.zero_optimization_stage() < 3:
        return None
    weights = [_cut(name, one) for name, one in named_once(engine.module)[0].items()]
    found: WeightGather | None = getattr(engine, GATHERED, None)
    if found is None or not found.matches(weights):
        channels = channels_of(engine)
        found = WeightGather(
            weights, torch.device(engine.device),
            None if channels is None else channels["zero"],
            None if channels is None else channels.config.gathered, whole_job=whole_job,
        )  # fmt: skip
        setattr(engine, GATHERED, found)
    return found


def _cut(name: str, parameter: Any) -> CutWeight:
    """Describe a stage-3 parameter. Raises ConfigError if its shares are not in memory."""
    share, group = parameter.ds_tensor, parameter.ds_process_group
    if share.status.name != "AVAILABLE":
        todo = "its weights are on a disk; use offload_param to the cpu, or none"
        raise ConfigError(WHAT, Shown("offload_param to nvme"), todo)
    if parameter.ds_status.name == "INFLIGHT":
        todo = "a gather of DeepSpeed is under way; call it between two steps"
        raise ConfigError(WHAT, Shown(name), todo)
    if int(share.ds_numel) * dist.get_world_size(group) < int(parameter.ds_numel):
        todo = "its subgroups hold whole weights in a way of their own; remove mics_shard_size"
        raise ConfigError(WHAT, Shown("MiCS"), todo)
    return CutWeight(
        name, tuple(parameter.ds_shape), share.dtype, int(share.ds_numel), group,
        lambda: parameter.ds_tensor.data.view(-1)[: filled(parameter)],
    )  # fmt: skip


def _put(engine: Any, found: Sequence[Tensor], undo: ExitStack) -> None:
    """Give the parameters their whole weights, and remove DeepSpeed's hooks."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    optimizer = engine.optimizer
    offload = getattr(optimizer, "parameter_offload", optimizer)
    hooks = [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]
    without_hooks(hooks, undo)
    parameters: list[Any] = list(named_once(engine.module)[0].values())
    for parameter, whole in zip(parameters, found, strict=True):
        undo.callback(_restorer(parameter))
        parameter.data, parameter.ds_status = whole, ZeroParamStatus.AVAILABLE


def _restorer(parameter: Any) -> Callable[[], None]:
    """Return a function that restores a parameter's present data and status."""
    data, status = parameter.data, parameter.ds_status

    def restore() -> None:
        parameter.data, parameter.ds_status = data, status

    return restore
