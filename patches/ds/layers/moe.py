"""Expert-parallel all-to-all of Mixture of Experts layers, dimension ``ep``.

Seams: the classes ``sharded_moe._AllToAll`` (native MoE, even splits) and
``auto_ep_layer._AllToAllV`` (AutoEP, uneven splits, since 0.19.5). Both are looked up as module
globals where the layers apply them. ``dist.all_to_all_single`` is no seam, because it also carries
counts and other patches' payloads. An autograd Function has no reference to the engine, so the
layers' forward passes are wrapped too: they publish the channels of the engine that owns the layer.

Dispatch and combine are direction forward, their gradients backward. Rows of empty capacity slots
are zeros and stay zeros. Native: the capacity all-reduce (drop_tokens: false) and token counts.
Refused: AutoEP's DeepEP transport, which does not call these classes.

AutoEP's ranks send different numbers of rows, so applying ``min_bytes`` would take an extra
message. It does not apply there, and every message is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import ATTRIBUTE, AllToAll, Channel, Channels, channels_of
from hybridcomp.dimensions import Direction
from hybridcomp.patches.common.engine_packages import is_a
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds.layers.layer_scope import refuse
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam, has_module, since

NATIVE_MOE = "deepspeed.moe.sharded_moe"
AUTO_EP = "deepspeed.module_inject.auto_ep_layer"
AUTO_EP_REQUIREMENT = since(REQUIREMENT, "0.19.5")

ALL_TO_ALL = Seam(REQUIREMENT, NATIVE_MOE, "_AllToAll", None)
MOE_LAYER = Seam(REQUIREMENT, NATIVE_MOE, "MOELayer.forward", ("self", "input", "kwargs"))
ALL_TO_ALL_V = Seam(AUTO_EP_REQUIREMENT, AUTO_EP, "_AllToAllV", None)
AUTO_EP_LAYER = Seam(
    AUTO_EP_REQUIREMENT, AUTO_EP, "AutoEPMoELayer.forward", ("self", "hidden_states")
)

#: numel passed to the policy for AutoEP: above any min_bytes and equal on every rank
ANY_SIZE = 1 << 60

#: the channel of the layer whose forward pass runs in this thread
_RUNNING: Scope[Channel | None] = Scope("moe", None)


@around
def make_layer_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Publish the layer's channel; recomputation under checkpointing calls this again."""
    channels = channels_of(self)
    with _RUNNING.inside(None if channels is None else channels["ep"]):
        return original(self, *args, **kwargs)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts; its backward pass returns the gradients by another all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, original: Any, channel: Channel, direction: Direction, group: Any, values: Tensor
    ) -> Tensor:
        ctx.original, ctx.channel, ctx.group = original, channel, group
        message = AllToAll(
            numel=values.numel(), dtype=values.dtype, group=group, direction=direction,
            values=values,
        )  # fmt: skip
        native: Callable[[], Tensor] = partial(original.forward, ctx, group, values)
        return channel.run(
            message,
            native=native,
            encoded=lambda handle: message.complete(handle).view(values.shape),
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, Tensor]:
        apply: Callable[..., Any] = _Exchange.apply
        back = apply(ctx.original, ctx.channel, "backward", ctx.group, grad)
        return None, None, None, None, back


class _ExchangeRows(torch.autograd.Function):
    """All-to-all of unequal numbers of rows; its backward pass returns the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        original: Any,
        channel: Channel,
        direction: Direction,
        group: Any,
        rows: Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
    ) -> Tensor:
        ctx.original, ctx.channel = original, channel
        ctx.group, ctx.input_splits, ctx.output_splits = group, in_splits, out_splits
        width = int(rows.shape[1])
        message = AllToAll(
            numel=ANY_SIZE, dtype=rows.dtype, group=group, direction=direction, values=rows,
            in_splits=in_splits, out_splits=out_splits, row=width,
        )  # fmt: skip
        native: Callable[[], Tensor]
        native = partial(original.forward, ctx, group, rows, in_splits, out_splits)
        exchanged: Tensor = channel.run(
            message,
            native=native,
            encoded=lambda handle: message.complete(handle).view(-1, width),
        )
        return exchanged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        apply: Callable[..., Any] = _ExchangeRows.apply
        splits = ctx.output_splits, ctx.input_splits
        back = apply(ctx.original, ctx.channel, "backward", ctx.group, grad, *splits)
        return None, None, None, None, back, None, None


def switch(ours: Any, original: Any) -> type:
    """Replace ``original`` by the function ``ours`` inside layers of an attached engine."""

    def apply(group: Any, *args: Any) -> Any:
        channel = _RUNNING.get()
        if channel is None:
            return original.apply(group, *args)
        return ours.apply(original, channel, "forward", group, *args)

    # a subclass, so that isinstance checks and upstream's static methods still work
    return type(original.__name__, (original,), {"apply": staticmethod(apply)})


def attached(engine: Any, channels: Channels) -> None:
    """Tag the MoE layers of an engine. Raises ConfigError if DeepEP would bypass ``ep``."""
    for name, module in engine.module.named_modules():
        if not is_a(module, "MOELayer", "AutoEPMoELayer"):
            continue
        setattr(module, ATTRIBUTE, channels)
        if getattr(module, "comm_backend", None) == "deepep" and module.ep_size > 1:
            found = f"expert_parallel.comm_backend: 'deepep' in {name}"
            reason = "DeepEP moves tokens with kernels of its own"
            refuse(channels, "ep", found, reason, "use another comm_backend")


def _patches() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    patches = (
        (ALL_TO_ALL, partial(switch, _Exchange)),
        (MOE_LAYER, make_layer_forward),
    )
    if not has_module(AUTO_EP):
        return patches
    return (
        *patches,
        (ALL_TO_ALL_V, partial(switch, _ExchangeRows)),
        (AUTO_EP_LAYER, make_layer_forward),
    )


COVERS = ("ep",)
ATTACHED = attached
PATCHES = _patches()
