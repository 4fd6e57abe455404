"""Describe a DeepSpeed engine's stage for ``hybridcomp.generate``: pipelines, token slices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from hybridcomp.channels import channels_of
from hybridcomp.collectives import Group
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.generation import GenerateConfig
from hybridcomp.errors import ConfigError
from hybridcomp.generation import GeneratingStage
from hybridcomp.job import small_messages
from hybridcomp.nn.slices import SlicedStage
from hybridcomp.patches.ds.pipeline.pipe import PIPE, Pipe
from hybridcomp.patches.ds.pipeline.pipeline import is_dualpipev

KEY = "generate"
#: gloo groups for frames, made if the default ones do not send over gloo between CPUs, by ranks
_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def stage_of(engine: Any) -> GeneratingStage:
    """Return this rank's stage; every rank of the job calls it. Raises ConfigError."""
    from deepspeed.runtime.pipe.module import PipelineModule

    module = engine.module
    if isinstance(module, SlicedStage):
        stage = module.stage
        layers: list[Callable[..., Any]] = [lambda values, past: stage(values, past)]
        group, grid, parts = module.pipeline.group, engine.mpu, [stage]
    elif isinstance(module, PipelineModule) and not is_dualpipev(engine):
        _check(engine)
        layers, grid = list(module.forward_funcs), engine.grid
        group, parts = grid.get_pipe_parallel_group(), [module]
    else:
        todo = "expected a PipelineModule or a SlicedStage: other models generate by themselves"
        raise ConfigError(
            KEY, Shown(type(module).__name__), f"{todo} in hybridcomp.gathered(engine)"
        )
    tensor = None if grid is None else grid.get_slice_parallel_group()
    channels = channels_of(engine)
    config = None if channels is None else channels.config
    return GeneratingStage(
        layers=layers,
        modules=parts,
        device=next(module.parameters()).device,
        group=_frames(group),
        tensor=tensor if tensor is not None and dist.get_world_size(tensor) > 1 else None,
        replica=0 if grid is None else grid.get_data_parallel_id(),
        channels=channels,
        is_cut=_is_cut(layers[-1] if layers else stage),
        settings=(config and config.generate) or GenerateConfig(),
        min_bytes=0 if config is None else config.min_bytes,
    )


def _check(engine: Any) -> None:
    """Refuse pipelines whose stages cannot run a single pass."""
    pipe: Pipe | None = getattr(engine, PIPE, None)
    if pipe is not None and pipe.waitless is not None:
        todo = "its stages hold other weights than they train; use a pipeline with a flush"
        raise ConfigError(KEY, Shown("pipeline.versions without a flush"), todo)
    if engine.has_moe_layers:
        todo = (
            "experts of other replicas would have to take part in each pass; use hybridcomp.publish"
        )
        raise ConfigError(KEY, Shown("layers of experts"), todo)


def _frames(group: Any) -> Any:
    """Return a group of the ranks of ``group`` that sends over gloo between CPUs; a collective."""
    if Group.of(group).backends.get("cpu") == "gloo":
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    known = _GROUPS.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        for line in sorted(set(small_messages.gather_objects(ranks))):
            known[line] = dist.new_group(line, backend="gloo")
    return known[ranks]


def _is_cut(layer: Any) -> bool:
    """Return whether a layer's weight is marked, as Megatron's are, as sharded over ranks."""
    parts = [layer, *layer.args] if isinstance(layer, partial) else [layer]
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    cut = [
        module
        for module in modules
        for weight in module.parameters(recurse=False)
        if getattr(weight, "tensor_model_parallel", False)
        and getattr(weight, "partition_dim", -1) == 0
    ]
    return bool(cut) and not getattr(cut[-1], "gather_output", False)
