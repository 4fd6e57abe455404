"""FSDP2 (``fully_shard``): gathers of parameters and reductions of gradients, dimensions ``zero``
and ``dp``.

``set_custom_all_gather`` and ``set_custom_reduce_scatter`` are torch's slots (``comms``). An HSDP
mesh sums gradients between replicas by a plain ``all_reduce`` over the mesh's process group, so
that group is replaced by one that encodes.

Upstream still decides which messages are sent, when micro-batches are accumulated, and by what
gradients are divided. Deltas cannot be sent, as unsharded parameters are freed. Every rank keeps
exact fp32 or bf16 shards, so errors of gathers do not accumulate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hybridcomp.autotune.trials import StepTraffic, main_dtype
from hybridcomp.channels.messages.kept_weights import NONE_KEPT
from hybridcomp.collectives.topology import machines
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.job.devices import device_name
from hybridcomp.patches.rules.planned import hold_to_machines, hold_to_plan
from hybridcomp.patches.torch import rules, steps, trained_set
from hybridcomp.patches.torch import torch_versions as windows
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.fsdp2 import comms as fsdp2_comms
from hybridcomp.patches.torch.fsdp2 import copies as fsdp2_copies
from hybridcomp.patches.torch.fsdp2 import gradients as fsdp2_gradients
from hybridcomp.patches.torch.fsdp2 import rules as fsdp2_rules
from hybridcomp.patches.torch.fsdp2.members import Members, names_of
from hybridcomp.patches.torch.session import Source, agree_on, read, session_of
from hybridcomp.patches.torch.state.identity import identity_of
from hybridcomp.session.engine_session import EngineSession

REQUIREMENT = windows.FSDP2
COVERS = ("zero", "dp", "sync", "embed")
ZERO: tuple[Dimension, ...] = ("zero",)
DP: tuple[Dimension, ...] = ("dp",)
ROOT = (
    "FSDP2 is attached as a whole, or a part would stay native: call attach once, for the root, "
    "after the last fully_shard; hybridcomp.detach(part) lets go of a part"
)


def groups_of(model: nn.Module) -> list[Any]:
    """Return torch's parameter groups of ``model``, each once, in the order of its modules."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                found[id(group)] = group
    return list(found.values())


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def attach(model: nn.Module, source: Source | None, undo: ExitStack) -> Attached | None:
    """Fill the slots of all groups; return None if there is no block.

    ``undo`` receives callbacks that detach the model. Raises ConfigError, AgreementError.
    """
    block, groups = read(source), groups_of(model)
    if block is not None and any(map(fsdp2_comms.has_output, groups)):
        raise ConfigError("hybridcomp.attach", Shown("a part that is attached already"), ROOT)
    if not groups:
        if block is None:
            return None
        todo = "fully_shard shards no parameter of it, so that nothing is sent; do not attach it"
        raise ConfigError("hybridcomp.attach", Shown(f"a {type(model).__name__}"), todo)
    job = fsdp2_rules.job_of(model, groups)
    agree_on(block, "fsdp2", job.ranks)
    if block is None:
        return None
    count = len(job.ranks)
    stage = 3 if count > 1 else None  # unknown on one rank, for which plans say 0
    shards = job.shards if job.replicas > 1 else 1  # in plans 1 stands for all ranks
    hold_to_plan(block, {"ranks": count, "data": count, "zero_stage": stage, "shards": shards})
    hold_to_machines(block, lambda: machines(device_name(groups[0].device)))
    cut = "layers that DTensor cuts are not gathered" if job.tensor_parallel else ""
    absent = rules.check(block, fsdp2_rules.FSDP2, job, cut)
    fsdp2_rules.check_hierarchy(block, job)
    session = session_of(block, groups[0].device, absent, job.ranks, undo)
    names = names_of(model)
    members = [Members(group, names, fsdp2_rules.whereabouts(group, job)) for group in groups]
    for one in members:
        for member in one.members:
            session.channels.factors.learn(member.name, (member.rows, member.numel // member.rows))
        for place in set(range(len(one.members))) - set(one.trained):
            member, dtype = one.members[place], fsdp2_rules.dtype_of(one.group.fsdp_params[place])
            session.channels.frozen_numels[dtype, member.numel == member.rows] += member.numel
    if block.zero.keeps_frozen is not None and not session.channels.frozen_numels:
        session.say(NONE_KEPT)
    session.place(job.process_groups, of_user=True)
    _measure(session, job, members)
    session.warn(job.dtypes)
    inside = block.hierarchy != "none"
    sends = fsdp2_gradients.sends(members, inside)
    attached = Attached(
        "fsdp2", identity_of(model), session, lambda: _parameters(groups),
        lambda: fsdp2_gradients.divisors(members, inside), job.layout, lambda: sends,
        reduces=len(job.ranks) > 1,
    )  # fmt: skip
    undo.callback(attached.detach)
    copies = fsdp2_copies.groups_of(session.channels)
    for one in members:
        attached.on_detach(functools.partial(fsdp2_comms.empty, one))
        fsdp2_comms.fill(one, attached, native_inside=inside, copies=copies)
        # checked before a message: messages are outside of compiled code, the hooks may be inside
        one.before_first = functools.partial(_check_whole, one.group.modules[0])
        for module in one.group.modules:
            attached.on_detach(module.register_forward_pre_hook(_Enter(one, attached)).remove)
    if job.ignores_tables and session.channels["embed"].active:
        from hybridcomp.patches.torch.ignored_tables import IgnoredTables

        ignored = IgnoredTables(model, session.channels["embed"], None)
        attached.average_ignored = ignored.exchange
        attached.on_detach(ignored.tables.leave)
    steps.follow(attached)
    if job.ranks[0] == dist.get_rank():
        named = (
            (m.name, p) for one in members for m, p in zip(one.members, one.sharded, strict=True)
        )
        trained_set.watch(attached, named, averages_all=True)
    return attached


def is_served(model: nn.Module) -> bool:
    """Return whether the slots of all groups of ``model`` are filled."""
    groups = groups_of(model)
    return bool(groups) and all(map(fsdp2_comms.has_output, groups))


@dataclass
class _Enter:
    """Forward pre-hook of an FSDP2 module: notes passes in which any of its parameters trains.

    Passes of a wholly frozen model are ignored even with gradients enabled, as no step follows.
    """

    members: Members
    attached: Attached
    is_whole: bool = False

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if not self.is_whole and not torch.compiler.is_compiling():
            _check_whole(module)
            self.is_whole = True
        if torch.is_grad_enabled() and self.members.trained:
            self.attached.entered(module.training)


def _check_whole(module: Any) -> None:
    """Raise ConfigError if some groups of the model are not attached and would stay native.

    FSDP determines in the first pass, before the hooks of ``attach``, which groups belong together.
    """
    for state in module._get_fsdp_state()._state_ctx.all_states:
        if not all(map(fsdp2_comms.has_output, _groups(state))):
            raise ConfigError(
                "hybridcomp.attach", Shown("fully_shard or a slot set after it"), ROOT
            )


def _parameters(groups: list[Any]) -> Iterator[Tensor]:
    for group in groups:
        for parameter in group.fsdp_params:
            yield parameter.sharded_param


def _measure(session: EngineSession, job: fsdp2_rules.ShardedJob, members: list[Members]) -> None:
    """Measure dimensions zero and dp with messages like a step's, over the process group of each.

    Parameters are gathered inside a shard group; an HSDP mesh sums gradients between its replicas,
    in the dtype that FSDP reduces in, which is often wider than that of the parameters.
    """
    size = job.shards
    numels = tuple(filter(None, (member.numel(member.trained, size) for member in members)))
    whole = tuple(member.numel(range(len(member.members)), size) for member in members)
    total = sum(numels)
    if size > 1:
        # deltas are added to what FSDP keeps, without a copy
        kept = StepTraffic(whole, "gather", copied=False)
        gathers: dict[Dimension, StepTraffic] = {"zero": kept}
        gathered = [
            (fsdp2_rules.dtype_of(parameter), member.numel)
            for one in members
            for parameter, member in zip(one.group.fsdp_params, one.members, strict=True)
        ]
        dtype = main_dtype(gathered, gathered[0][0])
        session.measure(job.shard_group, dtype, total, gathers, only=ZERO)
    sums: dict[Dimension, StepTraffic] = {"dp": StepTraffic(numels, "scatter")}
    group = job.shard_group
    if job.replicas > 1:
        sums["dp"] = StepTraffic(tuple(-(-numel // size) for numel in numels), "sum")
        group = job.replica_group
    reduced = [
        (fsdp2_gradients.reduce_dtype(one.group), one.numel(one.trained, size)) for one in members
    ]
    dtype = main_dtype(reduced, reduced[0][0])
    session.measure(group, dtype, total, sums, only=DP)
