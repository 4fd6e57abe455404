"""List the ranges of weights that this rank holds under FSDP2 or DDP, for publishing.

Under FSDP2 the sharded parameters are read, whether a parameter is gathered at the moment or not.
Where a mixed-precision policy names a 16-bit ``param_dtype``, the model computes with the rounded
shards: these are published.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.collectives.topology import ranks_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.parameter_names import named_once, plain_name
from hybridcomp.patches.common.table_weights import with_tables
from hybridcomp.patches.common.unchanged import KnownParameters, changed
from hybridcomp.publishing import (
    EngineWeights,
    Held,
    WeightRange,
    stretch_of_block,
    unless_refused,
)

KEY = "publish"


def weights_of(model: nn.Module) -> EngineWeights:
    """Return the weights of ``model``; ``refused`` is set if shards are not whole rows."""
    if isinstance(model, DistributedDataParallel):
        weights = _replicated(model.module, ranks_of(model.process_group))
        return with_tables(weights, model.module)
    return unless_refused(functools.partial(_sharded, model), mesh_ranks(model))


def _replicated(module: nn.Module, ranks: tuple[int, ...]) -> EngineWeights:
    parameters, aliases = named_once(module)
    return EngineWeights(
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        {name: parameter.dtype for name, parameter in parameters.items()},
        [_whole(name, parameter) for name, parameter in parameters.items()],
        ranks,
        aliases,
        unchanged=KnownParameters(module),
        module=weakref.ref(module),
    )


def _whole(name: str, parameter: Tensor) -> Held:
    return Held(WeightRange(name, 0, parameter.numel()), lambda: parameter.data)


def _sharded(model: nn.Module) -> EngineWeights:
    from hybridcomp.patches.torch.fsdp2.members import names_of

    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    held: list[Held] = []
    aliases: dict[str, str] = {}
    modules = names_of(model)
    for group, member in members_of(model):
        name, *others = places_of(member._module_info, modules)
        aliases |= dict.fromkeys(others, name)
        sharded: Any = member.sharded_param
        shapes[name] = tuple(sharded.shape)
        dtypes[name] = group.mp_policy.param_dtype or sharded.dtype
        held.append(Held(_stretch(name, sharded), functools.partial(_local, member)))
    for name, parameter in unmanaged(model).items():  # fully_shard's ignored_params
        if name not in shapes:
            shapes[name], dtypes[name] = tuple(parameter.shape), parameter.dtype
            held.append(_whole(name, parameter))
    found = EngineWeights(
        shapes,
        dtypes,
        held,
        mesh_ranks(model),
        aliases,
        unchanged=_KnownShards(model, shapes, dtypes),
    )
    return with_tables(found, model)


def members_of(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the parameters that FSDP2 manages, each with its group."""
    from hybridcomp.patches.torch.fsdp2.fsdp2 import groups_of

    yield from (
        (group, fsdp_param) for group in groups_of(model) for fsdp_param in group.fsdp_params
    )


def unmanaged(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters that FSDP2 does not manage."""
    mine = {
        id(part)
        for _, member in members_of(model)
        for part in (member.sharded_param, getattr(member, "_unsharded_param", None))
    }
    return {n: p for n, p in named_once(model)[0].items() if id(p) not in mine}


def mesh_ranks(model: nn.Module) -> tuple[int, ...]:
    """Return the global ranks that hold shards of ``model``."""
    meshes = (member.sharded_param.device_mesh for _, member in members_of(model))
    return tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))


class _KnownShards:
    """Check, when called, that a sharded model still has its original parameters.

    A module must hold FSDP2's sharded or gathered parameter. FSDP2 itself may replace shards, so
    only the shards' shape, and the dtype in which the model computes, are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: dict[str, tuple[int, ...]],
        dtypes: dict[str, torch.dtype],
    ) -> None:
        self._model = weakref.ref(model)
        self._shapes, self._dtypes = dict(shapes), dict(dtypes)
        self._others = unmanaged(model)

    def __call__(self) -> None:
        model = self._model()
        assert model is not None, "the engine of a publisher is alive"
        from hybridcomp.patches.torch.fsdp2.members import names_of

        modules = names_of(model)
        for group, member in members_of(model):
            name = places_of(member._module_info, modules)[0]
            info, sharded = member._module_info, member.sharded_param
            now = getattr(info.module, info.param_name, None)
            if now is not sharded and now is not getattr(member, "_unsharded_param", None):
                raise changed(name, "it is another Parameter than when fully_shard was called")
            dtype = group.mp_policy.param_dtype or sharded.dtype
            if tuple(sharded.shape) != self._shapes.get(name) or dtype != self._dtypes[name]:
                raise changed(name, f"it has {tuple(sharded.shape)} values of {dtype} by now")
        others = unmanaged(model)
        for name in sorted({*others, *self._others}):
            then, now = self._others.get(name), others.get(name)
            if then is None or now is not then or now.dtype != self._dtypes[name]:
                raise changed(name, "it is not the Parameter that it was")


def places_of(info: Any, modules: dict[int, str]) -> list[str]:
    """Return the names of a parameter: its first name, and its further names if it is tied."""
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
