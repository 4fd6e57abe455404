"""All-to-all of DeepSpeed Ulysses and its ALST attention, dimension ``cp``.

Seams: the autograd functions of ``sequence.layer`` and the global ``dist`` through which they
exchange heads for sequence. ``single_all_to_all`` is no seam, because its overlapped form keeps the
handle, which must decode in ``wait()``. Queries, keys, values and the context are direction
forward, their gradients backward.

Since 0.19.1 ALST's exchange is an operator that takes its group's name, for torch.compile's sake; a
prefix of that name gives the direction. ALST's attention is not a module of the model, so it uses
the process's channels.

If the number of heads is not divisible, lengths differ between ranks and ``min_bytes`` does not
apply. Exact: position ids, losses. Refused: FPDT and AutoSP, which exchange in other functions and
in a compiled graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.dimensions import Direction
from hybridcomp.patches.common.collective_wrappers import make_all_to_all_single
from hybridcomp.patches.common.engine_packages import comes_from
from hybridcomp.patches.common.routes import SENDER, Sender, make_backward, make_stand_in
from hybridcomp.patches.ds.layers.layer_scope import (
    SEQUENCE,
    make_call,
    make_forward,
    owner,
    refuse,
    upstream_has,
)
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

LAYER = "deepspeed.sequence.layer"
ALST = "deepspeed.runtime.sequence_parallel.ulysses_sp"
FPDT = "deepspeed.sequence.fpdt_layer"

#: prefixes of a group's name in ALST's operator
FORWARD, BACKWARD = "hybridcomp:forward:", "hybridcomp:backward:"

_HEAD = ("ctx", "group", "input", "scatter_idx", "gather_idx", "batch_dim_idx", "stream", "handle")
SEQ_FORWARD = (
    (*_HEAD, "type", "is_fwd"),
    (*_HEAD, "type", "is_fwd", "num_kv_heads"),
)
BACKWARD_PARAMETERS = ("ctx", "grad_output")


def _seam(
    module: str, qualname: str, parameters: tuple[str, ...] | tuple[tuple[str, ...], ...] | None
) -> Seam:
    return Seam(REQUIREMENT, module, qualname, parameters)


@dataclass(frozen=True)
class Directed:
    """Process group for ALST's messages in one direction."""

    group: Any
    direction: Direction


def make_exchange_collective(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``deepspeed.comm.all_to_all_single``; the new one also takes a ``Directed`` group."""
    exchange = make_all_to_all_single(SEQUENCE)(original)

    @functools.wraps(original)
    def all_to_all_single(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if not isinstance(group, Directed):
            return exchange(output, tensor, *args, **kwargs)
        with SENDER.inside(Sender(owner(), group.direction)):
            return exchange(output, tensor, *args, **{**kwargs, "group": group.group})

    return all_to_all_single


def _name_directions() -> None:
    """Register every group of ALST's operator under one name per direction."""
    groups = sys.modules[LAYER]._all_to_all_groups
    for name, group in list(groups.items()):
        if not isinstance(group, Directed):
            groups.setdefault(FORWARD + name, Directed(group, "forward"))
            groups.setdefault(BACKWARD + name, Directed(group, "backward"))


@around
def make_register(original: Callable[..., str], group: Any) -> str:
    """Register a group with its directions, which a compiled region could not add later."""
    name = original(group)
    _name_directions()
    return name


def make_exchange(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ALST's operator to pass the direction; backward gets the name that forward was given."""
    _name_directions()  # for groups that are already registered

    def exchange(input: Tensor, group_name: str) -> Tensor:
        if group_name.startswith(FORWARD):
            return original(input, BACKWARD + group_name.removeprefix(FORWARD))
        if group_name.startswith(BACKWARD):  # a gradient of a gradient
            return original(input, group_name)
        return original(input, FORWARD + group_name)

    return exchange


def attached(engine: Any, channels: Channels) -> None:
    """Raise ConfigError if FPDT would bypass ``cp``. ``autotp`` has tagged the layers."""
    if any(comes_from(module, FPDT) for module in engine.module.modules()):
        reason = "FPDT exchanges chunks in functions of its own"
        refuse(channels, "cp", "FPDT_Attention", reason, "use DistributedAttention")


def _alst() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    if not upstream_has(LAYER, "_dim_zero_all_to_all_op"):
        name = "_DimZeroAllToAll"
        return (
            (_seam(LAYER, f"{name}.forward", ("ctx", "group", "input")), make_forward),
            (_seam(LAYER, f"{name}.backward", BACKWARD_PARAMETERS), make_backward),
        )
    return (
        (_seam(ALST, "register_all_to_all_group", ("group",)), make_register),
        (_seam(LAYER, "_dim_zero_all_to_all_op", None), make_exchange),
    )


COVERS = ("cp",)
ATTACHED = attached
PATCHES: tuple[tuple[Seam, Callable[..., Any]], ...] = (
    (_seam(LAYER, "dist", None), make_stand_in({"all_to_all_single": make_exchange_collective})),
    (_seam(LAYER, "DistributedAttention.__call__", ("self", "args", "kwargs")), make_call),
    (_seam(LAYER, "_SeqAllToAll.forward", SEQ_FORWARD), make_forward),
    (_seam(LAYER, "_SeqAllToAll.backward", BACKWARD_PARAMETERS), make_backward),
    *_alst(),
)
