"""State which stretches of the weights this rank holds under FSDP2 or DDP, for publishing.

Under FSDP2 the sharded parameters are read, whether a parameter is gathered at the moment or not.
Where a mixed-precision policy names a 16-bit ``param_dtype``, the model computes with the rounded
shards: these are published.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.collectives.topology import ranks_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.parameter_names import named_once, plain_name
from hybridcomp.publishing import EngineWeights, Held, WeightRange, stretch_of_block

KEY = "publish"


def weights_of(model: nn.Module) -> EngineWeights:
    """Return the weights of ``model``. Raises ConfigError on a cut that has no even rows."""
    if isinstance(model, DistributedDataParallel):
        return _replicated(model.module, ranks_of(model.process_group))
    return _sharded(model)


def _replicated(module: nn.Module, ranks: tuple[int, ...]) -> EngineWeights:
    parameters, aliases = named_once(module)
    return EngineWeights(
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        {name: parameter.dtype for name, parameter in parameters.items()},
        [_whole(name, parameter) for name, parameter in parameters.items()],
        ranks,
        aliases,
    )


def _whole(name: str, parameter: Tensor) -> Held:
    return Held(WeightRange(name, 0, parameter.numel()), lambda: parameter.data)


def _sharded(model: nn.Module) -> EngineWeights:
    from hybridcomp.patches.torch.fsdp2 import groups_of
    from hybridcomp.patches.torch.fsdp2_members import names_of

    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    held: list[Held] = []
    aliases: dict[str, str] = {}
    ranks: set[int] = set()
    managed: set[int] = set()
    modules = names_of(model)
    for group, one in ((g, one) for g in groups_of(model) for one in g.fsdp_params):
        name, *others = _names(one._module_info, modules)
        aliases |= dict.fromkeys(others, name)
        sharded: Any = one.sharded_param
        managed |= {id(sharded), id(getattr(one, "_unsharded_param", None))}
        ranks |= set(sharded.device_mesh.mesh.flatten().tolist())
        shapes[name] = tuple(sharded.shape)
        dtypes[name] = group.mp_policy.param_dtype or sharded.dtype
        held.append(Held(_stretch(name, sharded), functools.partial(_local, one)))
    for name, parameter in named_once(model)[0].items():
        if id(parameter) not in managed and name not in shapes:  # fully_shard's ignored_params
            shapes[name], dtypes[name] = tuple(parameter.shape), parameter.dtype
            held.append(_whole(name, parameter))
    return EngineWeights(shapes, dtypes, held, tuple(sorted(ranks)), aliases)


def _names(info: Any, modules: dict[int, str]) -> list[str]:
    """Return the names of a parameter: its first, and those under which it is tied."""
    places = [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]
    names = [".".join(filter(None, (modules.get(id(m), ""), name))) for m, name in places]
    return [plain_name(name) for name in names]


def _local(one: Any) -> Tensor:
    local: Tensor = one.sharded_param.to_local()
    return local


def _stretch(name: str, sharded: Any) -> WeightRange:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    found = stretch_of_block(name, sharded.shape, offset, local)
    if found is None:
        placements = Shown(f"{name} {tuple(sharded.shape)} placed as {sharded.placements}")
        todo = "its values on a rank are no evenly spaced rows; cut it at one dimension"
        raise ConfigError(KEY, placements, todo)
    return found


def is_engine(model: Any) -> bool:
    """Return whether ``model`` is under DDP, or under fully_shard as a whole or in part."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, nn.Module) or not dist.is_initialized():
        return False
    wrapped = isinstance(model, DistributedDataParallel)
    return wrapped or any(isinstance(module, FSDPModule) for module in model.modules())
