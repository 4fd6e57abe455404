"""``detach`` restores the very objects that ``attach`` replaced in FSDP2's groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridcomp
from hybridcomp.patches.torch.fsdp2.fsdp2 import groups_of
from hybridcomp.patches.torch.fsdp2.members import PREPARE, Members
from tests.ranks import RunRanks

BLOCK: dict[str, Any] = {"dp": {"codec": "blockint"}, "ledger": {"every": 1_000_000}}


def slots(group: Any) -> list[Any]:
    """Return the slots' objects; a method (torch 2.15) counts as its function."""
    prepare = getattr(group, PREPARE, None)
    replicas = group.mesh_info.replicate_process_group
    comms = [group._all_gather_comm, group._reduce_scatter_comm]
    return [group.mesh_info, replicas, *comms, getattr(prepare, "__func__", prepare)]


def given_back() -> list[list[bool]]:
    """Return whether each slot holds its original object, while attached and after ``detach``."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(8, 8), mesh=mesh)
    (group,) = groups_of(model)
    before, found = slots(group), []
    hybridcomp.attach(model, BLOCK)
    found.append([a is b for a, b in zip(slots(group), before, strict=True)])
    hybridcomp.detach(model)
    found.append([a is b for a, b in zip(slots(group), before, strict=True)])
    assert "post_backward" not in vars(group)
    return found


def test_detach_gives_back_the_objects_of_torch(module_ranks: RunRanks) -> None:
    for attached, detached in module_ranks(2, given_back):
        assert not any(attached[:4]) and all(detached), (attached, detached)


def test_a_group_gets_back_the_function_that_it_holds_itself() -> None:
    """Torch 2.15 stores it on each group instead of the class: without it the next pass fails."""

    def prepare(parameters: Any, gradients: Any, world_size: int) -> int:
        return len(parameters)

    group = SimpleNamespace(fsdp_params=["a", "b"], **{PREPARE: prepare})
    members = Members(SimpleNamespace(fsdp_params=[]), {})
    members.group = group
    members.follow_messages()
    noted: Any = getattr(group, PREPARE)
    assert noted is not prepare and noted(group.fsdp_params[1:], [], 2) == 1
    members.unwatch()
    assert getattr(group, PREPARE) is prepare
    members.unwatch()  # harmless
    assert getattr(group, PREPARE) is prepare
