"""Fill the slots of an FSDP2 group with an encoded all-gather, reduce-scatter and all-reduce."""

from __future__ import annotations

import copy
from typing import Any

from hybridcomp.channels.messages.node_copies import CopyGroups
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.fsdp2.copies import NodeCopyGather
from hybridcomp.patches.torch.fsdp2.frozen import FrozenGather
from hybridcomp.patches.torch.fsdp2.gathers import EncodedAllGather
from hybridcomp.patches.torch.fsdp2.members import Members
from hybridcomp.patches.torch.fsdp2.sums import EncodedReduceScatter, EncodedReplicas


def fill(
    members: Members, attached: Attached, native_inside: bool, copies: CopyGroups | None = None
) -> None:
    """Put encoded collectives into the slots of one group.

    Torch's two setters refuse a module with several groups, as the group would be ambiguous; here
    every group gets separate objects, so the attributes behind the setters are set directly.

    Args:
        native_inside: with replicas, whether to reduce-scatter gradients natively inside a shard
            group, since the all-reduce between replicas encodes.
        copies: the ranks by node, if parameters are gathered from copies that nodes keep.
    """
    group, replicas = members.group, members.replicas
    channel = attached.channels["zero"]
    kept = None if copies is None else NodeCopyGather(members, channel, copies)
    settings = attached.channels.config.zero.keeps_frozen
    frozen = None if settings is None else FrozenGather(members, channel, settings)
    gather = EncodedAllGather(members, attached, group._all_gather_comm, kept, frozen)
    group._all_gather_comm = gather
    native_inside = native_inside and replicas is not None
    scatter = EncodedReduceScatter(members, attached, group._reduce_scatter_comm, native_inside)
    group._reduce_scatter_comm = scatter
    if replicas is not None:
        # a copy: groups may share one mesh_info object
        encoded = EncodedReplicas(replicas, scatter, group.mesh_info)
        group.mesh_info = copy.copy(group.mesh_info)
        group.mesh_info.replicate_process_group = encoded
    members.follow_messages()
    if attached.channels.sums_in_node:
        members.reduce_unused(scatter.unused)


def empty(members: Members) -> None:
    """Restore the objects that ``fill`` replaced, except in slots that a user changed since."""
    group = members.group
    gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
    replicas = getattr(group.mesh_info, "replicate_process_group", None)
    if isinstance(gather, EncodedAllGather):
        group._all_gather_comm = gather.native
    if isinstance(scatter, EncodedReduceScatter):
        group._reduce_scatter_comm = scatter.native
    if isinstance(replicas, EncodedReplicas):
        group.mesh_info = replicas.mesh_info
    members.unwatch()


def has_output(group: Any) -> bool:
    """Return whether the slots of one of torch's parameter groups hold encoded collectives."""
    gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
    return isinstance(gather, EncodedAllGather) and isinstance(scatter, EncodedReduceScatter)
