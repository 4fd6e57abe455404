"""Whole weights of a model under FSDP2 for a roll-out (``hybridcomp.gathered``).

During the roll-out the modules hold separate whole parameters, in the compute dtype of the
mixed-precision policy, and FSDP2's forward hooks are removed. The sharded parameters, which
optimizers hold, are not touched. Under DDP every rank has all weights, and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.collectives.topology import ranks_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation.gathered import CutWeight, WeightGather
from hybridcomp.generation.rolling_out import WHAT, rolling_out, without_hooks
from hybridcomp.job.devices import default_device
from hybridcomp.patches.torch import attach
from hybridcomp.patches.torch.fsdp2.fsdp2 import groups_of
from hybridcomp.patches.torch.fsdp2.members import names_of
from hybridcomp.patches.torch.weights import members_of, mesh_ranks, places_of

#: attribute of a model: its ``WeightGather``
ATTRIBUTE = "_hybridcomp_gathered"


def gathered(model: nn.Module) -> AbstractContextManager[nn.Module]:
    """Return the context of ``hybridcomp.gathered`` for a model under FSDP2 or DDP."""
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        return _of_ranks(model.module, None, group)
    largest = max((_shard_group(one) for one in groups_of(model)), key=lambda one: one.size())
    return _of_ranks(model, model, largest)


def _of_ranks(
    module: nn.Module, sharded: nn.Module | None, group: dist.ProcessGroup
) -> AbstractContextManager[nn.Module]:
    """Return the context, which all ranks of the model enter: with islands not all of the job."""
    ranks = ranks_of(group) if sharded is None else mesh_ranks(sharded)
    whole = len(ranks) == dist.get_world_size()
    return rolling_out(
        module,
        lambda: None if sharded is None else _gather_of(sharded, whole),
        lambda found, undo: _put(module, found, undo),
        None if whole else ranks,
        None if whole else group,
        default_device(),
    )


def _shard_group(group: Any) -> dist.ProcessGroup:
    found: dist.ProcessGroup = group.mesh_info.shard_process_group
    return found


def _gather_of(model: nn.Module, whole_job: bool) -> WeightGather:
    """Return the object that gathers the weights of ``model``. Raises ConfigError."""
    names = names_of(model)
    weights = [_cut(group, member, names) for group, member in members_of(model)]
    found: WeightGather | None = vars(model).get(ATTRIBUTE)
    channels = attach.channels_of_model(model)
    channel = None if channels is None else channels["zero"]
    if found is None or found.channel is not channel or not found.matches(weights):
        settings = None if channels is None else channels.config.gathered
        device = groups_of(model)[0].device
        found = WeightGather(weights, device, channel, settings, whole_job=whole_job)
        vars(model)[ATTRIBUTE] = found
        if channels is not None:
            attached = vars(model)[attach.ATTRIBUTE]
            attached.on_detach(found.forget)
    return found


def _cut(group: Any, one: Any, names: dict[int, str]) -> CutWeight:
    """Describe an FSDP2 parameter. Raises ConfigError if DTensor shards it, too."""
    name, sharded = places_of(one._module_info, names)[0], one.sharded_param
    if one.is_dtensor:
        todo = "its ranks compute with parts of each weight; sample from an engine that "
        raise ConfigError(
            WHAT, Shown(f"tensor parallel, {name}"), f"{todo}hybridcomp.publish feeds"
        )
    return CutWeight(
        name, tuple(sharded.shape), group.mp_policy.param_dtype or sharded.dtype,
        math.prod(one.padded_sharded_param_size), _shard_group(group),
        lambda: one.sharded_param.to_local(), one.fsdp_placement.dim,
    )  # fmt: skip


def _put(model: nn.Module, found: Sequence[Tensor], undo: ExitStack) -> None:
    """Replace the modules' parameters by whole weights, and remove FSDP2's hooks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
            each = [one for handle in handles for one in getattr(handle, "handles", (handle,))]
            without_hooks(each, undo)
            for name, does in (("_pre_forward", _as_given), ("_post_forward", _as_computed)):
                # methods wrapped by register_fsdp_forward_method call these themselves
                undo.callback(vars(state).pop, name, None)
                vars(state)[name] = does
    for (_, one), whole in zip(members_of(model), found, strict=True):
        info, parameter = one._module_info, nn.Parameter(whole, requires_grad=False)
        places = [(info.module, info.param_name)]
        places += zip(info.shared_modules, info.shared_param_names, strict=True)
        for module, name in places:
            undo.callback(module._parameters.__setitem__, name, module._parameters[name])
            module._parameters[name] = parameter


def _as_given(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _as_computed(module: nn.Module, args: Any, output: Any) -> Any:
    return output
