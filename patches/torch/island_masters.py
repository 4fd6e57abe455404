"""State which weights an optimizer changes on this rank under FSDP2 or DDP, for ``sync``."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.parameter_names import named_once, plain_name
from hybridcomp.patches.torch.weights import members_of, mesh_ranks, unmanaged
from hybridcomp.sync import Masters
from hybridcomp.sync.kept_gradients import KeptGradients, before_leaves
from hybridcomp.sync.master_weights import in_memory, piece_of

KEY = "compression.sync"
#: advice: how to make the island the group of the engine
TODO = {
    "ddp": "build DistributedDataParallel with process_group=hybridcomp.island_group(block)",
    "fsdp2": "build the mesh of fully_shard by "
    "DeviceMesh.from_group(hybridcomp.island_group(block), device_type)",
}


def ranks_of_model(model: nn.Module) -> Ranks:
    """Return the ranks over which the gradients of ``model`` are averaged."""
    if isinstance(model, DistributedDataParallel):
        return ranks_of(model.process_group)
    return mesh_ranks(model)


def masters_of(model: nn.Module) -> Masters:
    """Return the trained weights of ``model``: under DDP whole, under FSDP2 this rank's shards.

    Raises ConfigError if fully_shard ignores a trained parameter.
    """
    if isinstance(model, DistributedDataParallel):
        every = named_once(model.module)[0]
        found = {n: p for n, p in every.items() if p.requires_grad}
        return Masters(
            [piece_of(name, parameter.data) for name, parameter in found.items()],
            lambda: [in_memory(parameter.data) for parameter in found.values()],
            _nothing,
            replicated=True,
            kept=KeptGradients(
                lambda: [parameter.grad for parameter in found.values()],
                functools.partial(before_leaves, found.values),
            ),
            trained=lambda: {name: one.requires_grad for name, one in every.items()},
        )
    shards = [one for _, one in members_of(model)]
    for name, parameter in unmanaged(model).items():
        if parameter.requires_grad:
            todo = "fully_shard ignores it, so its gradients are not averaged; freeze or shard it"
            raise ConfigError(KEY, Shown(f"the trained parameter {name}"), todo)
    places = list(enumerate(shards))
    trained = [shard for shard in shards if shard.sharded_param.requires_grad]
    return Masters(
        [piece_of(_name(i, one), _local(one)) for i, one in enumerate(trained)],
        lambda: [in_memory(_local(one)) for one in trained],
        functools.partial(_gather_again, model),
        replicated=False,
        kept=KeptGradients(
            lambda: [gradient for one in trained for gradient in _gradients(one)],
            functools.partial(before_leaves, lambda: list(map(_whole, trained))),
        ),
        trained=lambda: {_name(i, one): one.sharded_param.requires_grad for i, one in places},
    )


def _nothing() -> None:
    """Do nothing: the optimizer changes the very weights that the model computes with."""


def _gather_again(model: nn.Module) -> None:
    """Gather again the parameters that are gathered now, from their changed shards."""
    from hybridcomp.patches.torch.fsdp2.fsdp2 import groups_of

    for group in groups_of(model):
        if group.is_unsharded or group._all_gather_result is not None:
            group.wait_for_unshard()
            group._to_sharded()
            group.unshard()
            group.wait_for_unshard()


def _whole(one: Any) -> Tensor:
    """Return the autograd leaf of a parameter: unsharded if that exists."""
    found: Tensor = getattr(one, "_unsharded_param", one.sharded_param)
    return found


def _gradients(one: Any) -> list[Tensor | None]:
    """Return a parameter's gradients: of its shard, and those not reduced yet; None if missing."""
    whole = one.unsharded_accumulated_grad
    return [one.sharded_param.grad, _whole(one).grad, whole]


def _name(place: int, one: Any) -> str:
    return plain_name(str(one._param_fqn or place))


def _local(one: Any) -> Tensor:
    local: Tensor = one.sharded_param.to_local()
    return local.detach()
